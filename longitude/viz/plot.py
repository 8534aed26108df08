"""A canvas of braille dots: two across and four down in each character.

Curves in the terminal: axes with three numbers each, strokes that differ without colour too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from longitude.viz.text import gaps, short

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BLANK = 0x2800

Pattern = tuple[int, int]  # dots drawn, dots left out
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
        """One dot, counted from the top left; those outside are not drawn."""
        column, row = x // 2, y // 4
        if 0 <= column < self.width and 0 <= row < self.height:
            self.bits[row][column] |= DOTS[y % 4][x % 2]
            self.styles[row][column] = style

    def line(
        self, points: Sequence[tuple[float, float]], style: str = "", pattern: Pattern = SOLID
    ) -> None:
        """Straight strokes from point to point, dashed along their whole way."""
        drawn, skipped = pattern
        for step, (x, y) in enumerate(_walk(points)):
            if step % (drawn + skipped) < drawn:
                self.dot(x, y, style)

    def rows(self) -> list[Text]:
        """The canvas, a line of text for each row of characters."""
        return [
            Text.assemble(
                *((chr(BLANK + b) if b else " ", s) for b, s in zip(bits, styles, strict=True))
            )
            for bits, styles in zip(self.bits, self.styles, strict=True)
        ]


def sample(style: str, pattern: Pattern) -> Text:
    """A short stroke for a legend."""
    canvas = Canvas(3, 1)
    canvas.line([(0, 1), (5, 1)], style, pattern)
    return canvas.rows()[0]


def _walk(points: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """Every dot on the way, once."""
    last = None
    for (x0, y0), (x1, y1) in zip(points, [*points[1:], *points[-1:]], strict=True):
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for s in range(steps + 1):
            here = round(x0 + (x1 - x0) * s / steps), round(y0 + (y1 - y0) * s / steps)
            if here != last:
                yield here
            last = here


MARGIN = 7  # characters for the numbers left of a plot
HEIGHT = 10
DIM = "bright_black"
MARK = "green"
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
    """A titled picture of curves; the axis is shaded where the last one has no y.

    `mark` is an x with a name, drawn upright; `y_ends` are numbers that y reaches at the least;
    `x_ticks` are the numbers below, the first to find room first (else: both ends and the middle).
    """

    title: str
    axes: str
    lines: Sequence[Line]
    x_ratios: bool = False
    y_ratios: bool = False
    notes: Sequence[str] = ()
    mark: tuple[str, float] | None = None
    y_ends: Sequence[float] = ()
    x_ticks: Sequence[int] = ()
    height: int = HEIGHT


def draw(plot: Plot, width: int) -> Group:
    """The plot in `width` characters."""
    x = _axis([p[0] for line in plot.lines for p in line.points], plot.x_ratios)
    ys = [p[1] for line in plot.lines for p in line.points if p[1] is not None]
    y = _axis([*ys, *plot.y_ends], plot.y_ratios)
    across = width - MARGIN - 1
    canvas = Canvas(across, plot.height)
    _upright(canvas, plot.mark, x)
    for line in plot.lines:
        _stroke(canvas, line, x, y)
    labels = _labels(y, plot.height)
    body = [left(label) + row for label, row in zip(labels, canvas.rows(), strict=True)]
    hidden = gaps(plot.lines[-1].points)
    return Group(
        Text(plot.title, style="bold"),
        Text(plot.axes, style=DIM),
        *body,
        _floor(x, across, hidden),
        _ticks(x, across, plot.x_ticks) if plot.x_ticks else _numbers(x, across),
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


def _upright(canvas: Canvas, mark: tuple[str, float] | None, x: Axis) -> None:
    if mark and x.low <= mark[1] <= x.high:
        column = round(x.share(mark[1]) * (2 * canvas.width - 1))
        canvas.line([(column, 0), (column, 4 * canvas.height - 1)], MARK, DOTTED)


def _labels(y: Axis, height: int) -> list[str]:
    """Numbers beside the first, the middle and the last row."""
    middle = y.number(1 - (height // 2 + 0.5) / height)
    middle = 0 if abs(middle) < (y.high - y.low) / 100 and y.low < 0 else middle
    at = {0: y.high, height // 2: middle, height - 1: y.low}
    return [short(at[row]) if row in at else "" for row in range(height)]


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


def _ticks(x: Axis, across: int, ticks: Sequence[int]) -> Text:
    """Numbers below the places they are for, as far as they don't meet."""
    line = " " * across
    for tick in ticks:
        label = short(tick)
        at = round(x.share(tick) * (across - 1)) - len(label) // 2
        at = min(max(at, 0), across - len(label))
        if not line[max(at - 1, 0) : at + len(label) + 1].strip():
            line = line[:at] + label + line[at + len(label) :]
    return Text(" " * (MARGIN + 1) + line, style=DIM)


def _legend(plot: Plot, hidden: bool) -> list[Text]:
    """One entry a line: they never wrap, and stay under their own plot."""
    indent = " " * (MARGIN + 1)
    entries = [
        Text(indent) + sample(line.style, line.pattern) + Text(f" {line.name}")
        for line in plot.lines
        if line.name
    ]
    entries += [Text(indent) + Text(" ┊ ", MARK) + Text(f" {plot.mark[0]}")] if plot.mark else []
    entries += [Text(f"{indent}░░░ hidden")] if hidden else []
    return [*entries, *(Text(note, style=DIM) for note in plot.notes)]
