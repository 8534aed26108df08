"""What one would use instead: functions of other packages, found by name and imported last.

None of them is needed, none is imported before it is asked for, and one that is not there, or
not as it was when this was written, is a row that says so. That is why they are names and not
imports.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.suites.case import Way, error_line
from benchmarks.suites.rows import PEER
from benchmarks.suites.timing import Run


class Unfit(Exception):
    """Why a peer can't do the work at hand."""


def found(module: str, *names: str) -> list[Any]:
    """Functions of a package; raises ImportError where it lacks them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it thinks of its own code is not for our users
        home = import_module(module)
    missing = [name for name in names if not hasattr(home, name)]
    if missing:
        raise ImportError(f"{module} has no {', '.join(missing)}")
    return [getattr(home, name) for name in names]


def peer(
    name: str, package: str, make: Callable[[], Run], error: Callable[[Any], float] | None = None
) -> Way:
    """A peer's way, or the reason why there is none."""
    try:
        return Way(name, make(), PEER, error)
    except Unfit as e:
        return Way(name, None, PEER, why=str(e))
    except ImportError as e:
        lacks = isinstance(e, ModuleNotFoundError) and (e.name or "").split(".")[0] == package
        return Way(name, None, PEER, why="not installed" if lacks else error_line(e))
    except Exception as e:  # a build that does not fit this machine may raise anything
        return Way(name, None, PEER, why=error_line(e))
