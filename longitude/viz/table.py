"""A board: one task's scores by scheme and length, each number as a reader wants it.

The tables of the terminal, of Markdown and of the charts are all read off it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from longitude.training.lab.rows import TEXT, Bin, Cell, Score, Spread, summary

NOTHING = "–"  # where a scheme has no value


@dataclass(frozen=True)
class Board:
    """One task of one trained window: schemes down, lengths across."""

    task: str
    trained: int
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: Mapping[tuple[str, int], Cell]

    @property
    def by_loss(self) -> bool:
        """Whether it is scored by loss, where lower is better."""
        return self.task == TEXT

    @property
    def measure(self) -> str:
        """What its numbers are."""
        what = "loss of the last tokens, nats a byte" if self.by_loss else "share of exact answers"
        seeds = {c.spread.n for c in self.cells.values() if c.spread}
        if max(seeds, default=1) == 1:
            return what
        many = f"{'up to ' if len(seeds) > 1 else ''}{max(seeds)} seeds"
        return f"{what}; mean of {many} ± half their range"

    def mean(self, label: str, length: int) -> float | None:
        """The mean over seeds, where there is one."""
        cell = self.cells.get((label, length))
        return cell.spread.mean if cell and cell.spread else None

    def value(self, label: str, length: int) -> str:
        """The mean as printed; a dash where a scheme has none, nothing where it wasn't tried."""
        mean = self.mean(label, length)
        if mean is None:
            return NOTHING if (label, length) in self.cells else ""
        return self._printed(mean)

    def swing(self, label: str, length: int) -> str:
        """± half of what lies between the least and the greatest seed, where there are several."""
        cell = self.cells.get((label, length))
        if not cell or not cell.spread or cell.spread.n < 2:
            return ""
        return f"±{self._printed((cell.spread.greatest - cell.spread.least) / 2)}"

    def best(self, label: str, length: int) -> bool:
        """Whether no scheme does better at this length, and some do worse, as printed."""
        found = {
            m: self._printed(m) for s in self.labels if (m := self.mean(s, length)) is not None
        }
        if len({*found.values()}) < 2:
            return False
        return self.value(label, length) == found[min(found) if self.by_loss else max(found)]

    def reasons(self) -> list[str]:
        """Why there are dashes: each reason once, with the schemes and lengths it is for."""
        groups: dict[tuple[str, str], list[str]] = {}
        for label in self.labels:
            tried = [n for n in self.lengths if (label, n) in self.cells]
            missing = [n for n in tried if self.mean(label, n) is None]
            told = [c.refused for n in missing if (c := self.cells[label, n]).refused]
            if told:
                groups.setdefault((told[0], _where(missing, tried)), []).append(label)
        return [f"{', '.join(who)} {where}: {why}" for (why, where), who in groups.items()]

    def _printed(self, number: float) -> str:
        return f"{number:.{3 if self.by_loss else 2}f}"


def boards(scores: Iterable[Score]) -> list[Board]:
    """A board for each trained window and task, in the order in which the scores come."""
    cells: dict[tuple[int, str], dict[tuple[str, int], Cell]] = {}
    for c in summary(scores):
        cells.setdefault((c.trained, c.task), {})[c.label, c.length] = c
    return [
        Board(
            task=task,
            trained=trained,
            labels=tuple(dict.fromkeys(label for label, _ in found)),
            lengths=tuple(sorted({length for _, length in found})),
            cells=found,
        )
        for (trained, task), found in cells.items()
    ]


def points(bins: Iterable[Bin]) -> list[tuple[float, Spread]]:
    """One curve's points: each bin at the middle of its positions (counted from 1, on a log axis),
    and the last once more where it ends."""
    inside = sorted(bins, key=lambda b: b.first)
    path = [(math.sqrt((b.first + 1) * b.past), b.spread) for b in inside]
    return [*path, *((float(b.past), b.spread) for b in inside[-1:] if b.past > b.first + 1)]


def round_positions(trained: int, high: float) -> list[int]:
    """Numbers for an axis of positions: the trained window, and by fours up and down from it."""
    steps = [round(trained * 4.0**n) for n in (0, *range(1, 8), *range(-1, -12, -1))]
    return [n for n in dict.fromkeys(steps) if 1 <= n <= high]


def tidy(scores: Iterable[Score]) -> list[Score]:
    """The scores with their texts printable."""
    return [
        replace(
            s,
            scheme=printable(s.scheme),
            label=printable(s.label),
            task=printable(s.task),
            refused=s.refused and printable(s.refused),
        )
        for s in scores
    ]


def printable(text: str) -> str:
    """A text on one line, without what a terminal would obey and what ends vl_convert's process."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _where(missing: list[int], tried: list[int]) -> str:
    """At which lengths: all beyond one, or each by name."""
    if len(missing) > 1 and missing == tried[-len(missing) :]:
        return f"from {missing[0]} on"
    return f"at {', '.join(map(str, missing))}"
