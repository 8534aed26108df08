"""The lab's results as plain values without torch, for the tables and the charts.

A score is one scheme, seed, task and length; cells and bins are over the seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

TEXT = "text"  # the one task that is scored by its loss: lower is better
Stretch = tuple[int, int, float]  # first position, past the last, mean loss


@dataclass(frozen=True)
class Score:
    """How one trained model did on one task at one length. `value` is the mean loss of the last
    tokens (text, in nats a byte) or the share of exact answers (other tasks), or None with the
    reason in `refused`. `curve` is the loss by position."""

    scheme: str
    label: str
    seed: int
    task: str
    trained: int
    length: int
    value: float | None
    refused: str | None = None
    curve: tuple[Stretch, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"curve": [[*stretch] for stretch in self.curve]}


class Spread(NamedTuple):
    """The same number over several seeds."""

    mean: float
    least: float
    greatest: float
    n: int


class Cell(NamedTuple):
    """One scheme on one task at one length, over seeds; without a spread where it has no value."""

    task: str
    trained: int
    label: str
    length: int
    spread: Spread | None
    refused: str | None


class Bin(NamedTuple):
    """One scheme's loss over the positions from `first` to before `past`, over seeds."""

    trained: int
    label: str
    length: int
    first: int
    past: int
    spread: Spread


def summary(scores: Iterable[Score]) -> tuple[Cell, ...]:
    """Mean and range over the seeds, for each task, trained window, label and length."""
    groups: dict[tuple[str, int, str, int], list[Score]] = {}
    for label, s in _labelled(scores):
        groups.setdefault((s.task, s.trained, label, s.length), []).append(s)
    cells = []
    for group, members in groups.items():
        spread = _spread([s.value for s in members if s.value is not None])
        refused = next((s.refused for s in members if s.refused and not spread), None)
        cells.append(Cell(*group, spread, refused))
    return tuple(cells)


def curves(scores: Iterable[Score]) -> tuple[Bin, ...]:
    """Loss by position over seeds, from the longest text on which each label has a curve."""
    drawn = [(label, s) for label, s in _labelled(scores) if s.task == TEXT and s.curve]
    longest: dict[tuple[int, str], int] = {}
    for label, s in drawn:
        longest[s.trained, label] = max(s.length, longest.get((s.trained, label), 0))
    groups: dict[tuple[int, str, int, int, int], list[float]] = {}
    for label, s in drawn:
        for first, past, loss in s.curve if s.length == longest[s.trained, label] else ():
            groups.setdefault((s.trained, label, s.length, first, past), []).append(loss)
    return tuple(Bin(*group, _spread(losses)) for group, losses in groups.items())  # type: ignore[arg-type]


def _spread(values: list[float]) -> Spread | None:
    mean = math.fsum(values) / max(1, len(values))
    return Spread(mean, min(values), max(values), len(values)) if values else None


def _labelled(scores: Iterable[Score]) -> Iterator[tuple[str, Score]]:
    """Each score once (the last one of equals), with a label of its own. Two schemes under one
    label would be taken for two seeds: they get their written forms."""
    last = {(s.scheme, s.label, s.seed, s.task, s.trained, s.length): s for s in scores}
    schemes: dict[str, set[str]] = {}
    for s in last.values():
        schemes.setdefault(s.label, set()).add(s.scheme)
    return ((s.label if len(schemes[s.label]) == 1 else s.scheme, s) for s in last.values())
