"""Peers: functions of other packages that one would use instead, imported by name on demand.

No peer is required, and none is imported before it is measured. One that is missing, or whose
interface has changed since this was written, becomes a row that says so. This is why peers are
looked up by name and not imported at the top.
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
    """A peer does not support the workload; the message says why."""


def found(module: str, *names: str) -> list[Any]:
    """Return functions of a module by name; raise ImportError if it lacks any of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a package's own warnings are not for our users
        imported = import_module(module)
    missing = [name for name in names if not hasattr(imported, name)]
    if missing:
        raise ImportError(f"{module} has no {', '.join(missing)}")
    return [getattr(imported, name) for name in names]


def peer(
    name: str, package: str, make: Callable[[], Run], error: Callable[[Any], float] | None = None
) -> Way:
    """Return a peer's method; if it can't be built, one without `run` that gives the reason."""
    try:
        return Way(name, make(), PEER, error)
    except Unfit as e:
        return Way(name, None, PEER, why=str(e))
    except ImportError as e:
        missing = isinstance(e, ModuleNotFoundError) and (e.name or "").split(".")[0] == package
        return Way(name, None, PEER, why="not installed" if missing else error_line(e))
    except Exception as e:  # a build for another machine may raise anything
        return Way(name, None, PEER, why=error_line(e))
