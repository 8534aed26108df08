"""Curves in the terminal: axes with three numbers each, strokes that differ without colour too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from longitude.report.braille import SOLID, Canvas, Pattern, sample
from longitude.report.numbers import gaps, short

MARGIN = 7  # characters for the numbers left of a plot
HEIGHT = 10
DIM = "bright_black"
Point = tuple[float, float | None]


@dataclass(frozen=True)
class Axis:
    """A way to lay numbers on a line: as they are, or in equal ratios on both sides of 0."""

    low: float
    high: float
    ratios: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a number lies, 0 to 1."""
        a, b, v = (self._lay(x) for x in (self.low, self.high, value))
        return (v - a) / (b - a) if b > a else 0.5

    def number(self, share: float) -> float:
        """The number that lies so far along."""
        a, b = self._lay(self.low), self._lay(self.high)
        v = a + (b - a) * share
        return math.copysign(math.expm1(abs(v)), v) if self.ratios else v

    def _lay(self, value: float) -> float:
        return math.copysign(math.log1p(abs(value)), value) if self.ratios else value


@dataclass(frozen=True)
class Line:
    """A curve with its name; a point without y breaks it."""

    name: str
    points: Sequence[Point]
    style: str = "cyan"
    pattern: Pattern = SOLID


@dataclass(frozen=True)
class Plot:
    """A titled picture of curves; the axis is shaded where the last one has no y."""

    title: str
    axes: str
    lines: Sequence[Line]
    x_ratios: bool = False
    y_ratios: bool = False
    notes: Sequence[str] = ()


def draw(plot: Plot, width: int) -> Group:
    """The plot in `width` characters."""
    x = _axis([p[0] for line in plot.lines for p in line.points], plot.x_ratios)
    y = _axis([p[1] for line in plot.lines for p in line.points if p[1] is not None], plot.y_ratios)
    across = width - MARGIN - 1
    canvas = Canvas(across, HEIGHT)
    for line in plot.lines:
        _stroke(canvas, line, x, y)
    body = [left(label) + row for label, row in zip(_labels(y), canvas.rows(), strict=True)]
    hidden = gaps(plot.lines[-1].points)
    return Group(
        Text(plot.title, style="bold"),
        Text(plot.axes, style=DIM),
        *body,
        _floor(x, across, hidden),
        _numbers(x, across),
        *_legend(plot, bool(hidden)),
    )


def _axis(values: Sequence[float], ratios: bool) -> Axis:
    low, high = min(values, default=0), max(values, default=1)
    return Axis(low, high if high > low else low + 1, ratios)


def _stroke(canvas: Canvas, line: Line, x: Axis, y: Axis) -> None:
    wide, high = 2 * canvas.width - 1, 4 * canvas.height - 1
    columns: dict[int, list[float]] = {}
    for px, py in [*line.points, (0.0, None)]:
        if py is not None:  # points closer together than dots are drawn as their mean
            columns.setdefault(round(x.share(px) * wide), []).append((1 - y.share(py)) * high)
        elif columns:
            run = [(column, sum(ys) / len(ys)) for column, ys in columns.items()]
            canvas.line(run, line.style, line.pattern)
            columns = {}


def _labels(y: Axis) -> list[str]:
    """Numbers beside the first, the middle and the last row."""
    middle = y.number(1 - (HEIGHT // 2 + 0.5) / HEIGHT)
    middle = 0 if abs(middle) < (y.high - y.low) / 100 and y.low < 0 else middle
    at = {0: y.high, HEIGHT // 2: middle, HEIGHT - 1: y.low}
    return [short(at[row]) if row in at else "" for row in range(HEIGHT)]


def left(label: str) -> Text:
    """A number and the axis beside a row."""
    return Text(f"{label:>{MARGIN - 1}} ", style=DIM) + Text("┤" if label else "│", style=DIM)


def _floor(x: Axis, across: int, hidden: Sequence[tuple[float, float]]) -> Text:
    """The axis below, shaded where pairs are hidden."""
    line = Text(" " * MARGIN + "└", style=DIM)
    for column in range(across):
        here = x.number((column + 0.5) / across)
        line.append("░" if any(a <= here <= b for a, b in hidden) else "─", style=DIM)
    return line


def _numbers(x: Axis, across: int) -> Text:
    left, middle, right = (short(round(x.number(s))) for s in (0, 0.5, 1))
    room = across - len(left) - len(right)
    return Text(" " * (MARGIN + 1) + left + f"{middle:^{room}}" + right, style=DIM)


def _legend(plot: Plot, hidden: bool) -> list[Text]:
    """One entry a line: they never wrap, and stay under their own plot."""
    indent = " " * (MARGIN + 1)
    entries = [
        Text(indent) + sample(line.style, line.pattern) + Text(f" {line.name}")
        for line in plot.lines
        if line.name
    ]
    entries += [Text(f"{indent}░░░ hidden")] if hidden else []
    return [*entries, *(Text(note, style=DIM) for note in plot.notes)]
