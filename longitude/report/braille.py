"""A canvas of braille dots: two across and four down in each character."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

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
