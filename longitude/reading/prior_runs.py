"""Extensions of a model that `longitude extend` has measured, read from the folders of its runs.

A run counts for a model if its rows are of these weights; or of a model of this name, window and
scheme in another precision, whose weights have another digest. It counts for reading if its best
scheme helps and tells at least half of the passkeys: what forgets may have a low loss, but answers
nothing from far back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.eval.records import KIND, Subject

ADVICE, ROWS = "recommendation.json", "rows.jsonl"  # what `longitude extend` leaves in a folder
ENOUGH = 0.5  # of the passkeys


@dataclass(frozen=True)
class Extension:
    """The best scheme of one run, and how far it was measured."""

    run: str
    label: str
    scheme: str
    length: int
    passkeys: float | None  # the share that was told at this length, where any were asked

    @property
    def finds(self) -> bool:
        """Whether it finds what stands far back, as far as was asked."""
        return self.passkeys is None or self.passkeys >= ENOUGH

    @property
    def told(self) -> str:
        """What was measured, in a few words."""
        keys = "" if self.passkeys is None else f", where it tells {self.passkeys:.0%} of passkeys"
        return f"{self.label}, measured to {self.length:,} tokens in {self.run}{keys}"


def extensions(folder: Path, subject: Subject) -> list[Extension]:
    """What the runs in this folder, or this run itself, measured on the model. Folders that are no
    finished run of it are passed over."""
    if not folder.is_dir():
        return []
    runs = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = (_extension(run) for run in runs if _is_of(run / ROWS, subject))
    return [one for one in found if one is not None]


def _extension(run: Path) -> Extension | None:
    """The best of a run, if anything helped there."""
    try:
        told = json.loads((run / ADVICE).read_text(encoding="utf-8"))
        return _best(run, told["best"]) if told["helps"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _best(run: Path, best: Mapping[str, Any]) -> Extension:
    numbers = best["numbers"]
    keys = numbers.get("passkey")
    return Extension(
        run=str(run),
        label=str(best["label"]),
        scheme=str(best["scheme"]),
        length=int(numbers["length"]),
        passkeys=float(keys["mean"]) if keys else None,
    )


def _is_of(rows: Path, subject: Subject) -> bool:
    """Whether rows are of this model and of no other."""
    try:
        found = {_same(one, subject) for one in _subjects(rows)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return found == {True}


def _subjects(rows: Path) -> Iterator[Mapping[str, Any]]:
    with rows.open(encoding="utf-8") as lines:
        for key in (json.loads(line)["key"] for line in lines):
            if key["kind"] == KIND:
                yield key["subject"]


def _same(one: Mapping[str, Any], subject: Subject) -> bool:
    if one["weights"] == subject.weights:
        return True
    alike = ("scheme", "trained", "revision")
    return (
        one["dtype"] != subject.dtype
        and _last(one["name"]) == _last(subject.name)
        and all(one[name] == getattr(subject, name) for name in alike)
    )


def _last(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
