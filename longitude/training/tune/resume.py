"""A run on disk that may be stopped at any step, by anything.

The question stands in tune.json before the first step. Every `save_every` steps the state is
written under another name and moved into place (lab/checkpoint.py), so a kill or a full disk leaves
the one before. The same question in the same folder goes on from there; another is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from longitude.core.validate import UserError, short, shown
from longitude.training.checkpoint import Folder, write_json
from longitude.training.distributed import World
from longitude.training.tune.options import HISTORY, QUESTION, RESULT, STATE

GO_ON = "give the same command again to go on from there"
COMPLETE = ("config.json", "adapter_config.json")  # written last: who has one has everything


def claim(path: Path, question: dict[str, Any], resume: bool) -> None:
    """Raise unless this question may be answered here."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--out {path} is a file: give a folder.")
    held = _held(path)
    if held is None:
        if path.is_dir() and any(path.iterdir()):
            raise UserError(
                f"--out {path} holds other files and no run: give an empty or a new folder."
            )
        return
    if held != question:
        raise UserError(
            f"--out {path} holds another run ({_difference(held, question)}): give another folder."
        )
    if not resume and (done(path) or Folder(path).begun):
        raise UserError(
            f"--out {path} holds this very run already: go on with it, or give another."
        )


def begin(path: Path, question: dict[str, Any], told: dict[str, Any]) -> None:
    """Write down what is asked, before any work."""
    if _held(path) is None:
        with telling(path, 0, None):
            write_json(path / QUESTION, {"question": question, **told})


def done(path: Path) -> bool:
    """Whether a run has ended."""
    whole = any((path / RESULT / name).is_file() for name in COMPLETE)
    return whole and (path / HISTORY).is_file()


def kept_step(path: Path) -> int | None:
    """The step of the last whole state, None where there is none."""
    try:
        with safe_open(path / STATE, "pt") as f:
            return int((f.metadata() or {})["step"])
    except (FileNotFoundError, SafetensorError, KeyError, ValueError, OSError):
        return None


@contextmanager
def telling(path: Path, step: int, world: World | None) -> Iterator[None]:
    """Say what a full disk or a lost process leaves, and how to go on."""
    try:
        yield
    except UserError:
        raise
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"what was learned by step {step} could not be written to {path} ({_said(error)}): "
            f"{_left(path)}; free some space, and {GO_ON}."
        ) from error
    except RuntimeError as error:
        if world is None or world.size == 1:
            raise
        raise UserError(
            f"another process was lost at step {step} ({_said(error)}): {_left(path)}; {GO_ON}."
        ) from error


def _left(path: Path) -> str:
    step = kept_step(path)
    return "no state was kept before" if step is None else f"the state of step {step} is whole"


def _said(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return short(said.strip().splitlines()[0], 120).rstrip(".")


def _held(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads((path / QUESTION).read_text(encoding="utf-8"))["question"]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OSError) as e:
        raise UserError(
            f"{path / QUESTION} is no run of tune's ({e}): give another --out."
        ) from None


def _difference(held: dict[str, Any], asked: dict[str, Any]) -> str:
    """The first thing in which two questions differ; what follows from others comes last."""
    one, other = ({**_first(q), **q.get("recipe", {}), **q} for q in (held, asked))
    names = [n for n in {**one, **other} if n != "recipe" and one.get(n) != other.get(n)]
    name = names[0] if names else "question"
    return f"its {name} is {shown(one.get(name))}, not {shown(other.get(name))}"


def _first(question: dict[str, Any]) -> dict[str, Any]:
    return {name: question.get(name) for name in ("model", "target", "seed", "dtype")}
