"""Line plots in the terminal, drawn with braille dots: two across and four down in each character.

Lines differ by dash pattern as well as by colour, and axes may be logarithmic on both sides of
zero. (plotext draws braille too, but has neither; it would replace about half of this file.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from longitude.viz.text import gaps, short

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BLANK = 0x2800
MARGIN = 7  # characters for the numbers left of a plot
GAP = 2  # characters between columns
DIM = "bright_black"
MARK = "green"

Point = tuple[float, float | None]
Pattern = tuple[int, int]  # dots drawn, dots skipped
SOLID: Pattern = (1, 0)
DOTTED: Pattern = (1, 3)
DASHED: Pattern = (4, 3)
SPARSE: Pattern = (2, 6)


class Canvas:
    """Dots on a grid of width × height characters; the colour last drawn in a character wins."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.bits = [[0] * width for _ in range(height)]
        self.styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str = "") -> None:
        """Draw one dot, counted from the top left; dots outside the canvas are ignored."""
        column, row = x // 2, y // 4
        if 0 <= column < self.width and 0 <= row < self.height:
            self.bits[row][column] |= DOTS[y % 4][x % 2]
            self.styles[row][column] = style

    def line(
        self, points: Sequence[tuple[float, float]], style: str = "", pattern: Pattern = SOLID
    ) -> None:
        """Draw straight segments from point to point; the dash pattern continues across points."""
        drawn, skipped = pattern
        path: list[tuple[int, int]] = []
        for (x0, y0), (x1, y1) in pairwise([*points, points[-1]]):
            steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
            for s in range(steps + 1):
                dot = round(x0 + (x1 - x0) * s / steps), round(y0 + (y1 - y0) * s / steps)
                path += [dot] if path[-1:] != [dot] else []  # every dot once
        for step, (x, y) in enumerate(path):
            if step % (drawn + skipped) < drawn:
                self.dot(x, y, style)

    def rows(self) -> list[Text]:
        """The canvas as one line of text per row of characters."""
        return [
            Text.assemble(
                *((chr(BLANK + b) if b else " ", s) for b, s in zip(bits, styles, strict=True))
            )
            for bits, styles in zip(self.bits, self.styles, strict=True)
        ]


@dataclass(frozen=True)
class Axis:
    """The range of an axis: linear, or symmetric log (sign(v) log(1 + |v|))."""

    low: float
    high: float
    log: bool = False

    @staticmethod
    def over(values: Sequence[float], log: bool) -> Axis:
        """The axis that spans the values."""
        low, high = min(values, default=0), max(values, default=1)
        return Axis(low, high if high > low else low + 1, log)

    def share(self, value: float) -> float:
        """The position of a number along the axis, from 0 to 1."""
        a, b, v = (self._scaled(x) for x in (self.low, self.high, value))
        return (v - a) / (b - a)

    def number(self, share: float) -> float:
        """The number at a position along the axis: the inverse of `share`."""
        a, b = self._scaled(self.low), self._scaled(self.high)
        v = a + (b - a) * share
        return math.copysign(math.expm1(abs(v)), v) if self.log else v

    def _scaled(self, value: float) -> float:
        return math.copysign(math.log1p(abs(value)), value) if self.log else value


@dataclass(frozen=True)
class Line:
    """A curve with its name; a point without y breaks it."""

    name: str
    points: Sequence[Point]
    style: str = "cyan"
    pattern: Pattern = SOLID


@dataclass(frozen=True)
class Plot:
    """A titled plot of curves; the x axis is shaded where the last curve has no y.

    `mark` is an x with a name, drawn as a vertical line; `y_ends` are values that the y axis always
    spans; `x_ticks` are the numbers below, by priority (default: both ends and the middle).
    """

    title: str
    axes: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False
    notes: Sequence[str] = ()
    mark: tuple[str, float] | None = None
    y_ends: Sequence[float] = ()
    x_ticks: Sequence[int] = ()
    height: int = 10


def draw(plot: Plot, width: int) -> Group:
    """Draw the plot, `width` characters wide."""
    points = [p for line in plot.lines for p in line.points]
    x = Axis.over([px for px, _ in points], plot.x_log)
    y = Axis.over([*(py for _, py in points if py is not None), *plot.y_ends], plot.y_log)
    across = width - MARGIN - 1
    canvas = Canvas(across, plot.height)
    if plot.mark and x.low <= plot.mark[1] <= x.high:
        column = round(x.share(plot.mark[1]) * (2 * across - 1))
        canvas.line([(column, 0), (column, 4 * plot.height - 1)], MARK, DOTTED)
    for line in plot.lines:
        columns: dict[int, list[float]] = {}
        for px, py in [*line.points, (0.0, None)]:
            if py is not None:  # points closer together than dots are drawn as their mean
                height = (1 - y.share(py)) * (4 * plot.height - 1)
                columns.setdefault(round(x.share(px) * (2 * across - 1)), []).append(height)
            elif columns:
                run = [(column, sum(ys) / len(ys)) for column, ys in columns.items()]
                canvas.line(run, line.style, line.pattern)
                columns = {}
    middle = y.number(1 - (plot.height // 2 + 0.5) / plot.height)
    middle = 0 if abs(middle) < (y.high - y.low) / 100 and y.low < 0 else middle
    numbers = {0: short(y.high), plot.height // 2: short(middle), plot.height - 1: short(y.low)}
    hidden = gaps(plot.lines[-1].points)
    places = [x.number((column + 0.5) / across) for column in range(across)]
    floor = "".join("░" if any(a <= v <= b for a, b in hidden) else "─" for v in places)
    indent, legend = " " * (MARGIN + 1), []  # one per line, to stay under their own plot
    for line in (line for line in plot.lines if line.name):
        sample = Canvas(3, 1)
        sample.line([(0, 1), (5, 1)], line.style, line.pattern)
        legend.append(sample.rows()[0] + Text(f" {line.name}"))
    if plot.mark:
        legend.append(Text(" ┊ ", MARK) + Text(f" {plot.mark[0]}"))
    return Group(
        Text(plot.title, style="bold"),
        Text(plot.axes, style=DIM),
        *(left(numbers.get(n, "")) + row for n, row in enumerate(canvas.rows())),
        Text(" " * MARGIN + "└" + floor, style=DIM),
        Text(indent + _ticks(x, across, plot.x_ticks), style=DIM),
        *(Text(indent) + sample for sample in legend),
        *([Text(f"{indent}░░░ hidden")] if hidden else []),
        *(Text(note, style=DIM) for note in plot.notes),
    )


def left(label: str) -> Text:
    """The y axis beside one row of a plot, with a number if the row has one."""
    return Text(f"{label:>{MARGIN - 1}} " + ("┤" if label else "│"), style=DIM)


def side_by_side(plots: Sequence[Plot | Group], console: Console) -> None:
    """Print plots, two per row if the terminal is wide enough, with an empty line above each."""
    across = 2 if console.width >= 72 else 1
    width = min((console.width - GAP) // 2 if across == 2 else console.width, 60)
    drawn: list[RenderableType] = [draw(p, width) if isinstance(p, Plot) else p for p in plots]
    for first in range(0, len(drawn), across):
        row = Table.grid(padding=(0, GAP, 0, 0))
        for _ in drawn[first : first + across]:
            row.add_column(width=width)
        row.add_row(*drawn[first : first + across])
        console.print()
        console.print(row)


def _ticks(x: Axis, across: int, ticks: Sequence[int]) -> str:
    """Tick labels below an axis, without those that would collide with an earlier one."""
    named = {t: x.share(t) for t in ticks} or {round(x.number(s)): s for s in (0, 1, 0.5)}
    line = " " * across
    for tick, share in named.items():
        label = short(tick)
        at = round(share * (across - 1)) - len(label) // 2
        at = min(max(at, 0), across - len(label))
        if not line[max(at - 1, 0) : at + len(label) + 1].strip():
            line = line[:at] + label + line[at + len(label) :]
    return line
