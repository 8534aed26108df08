"""Markdown: tables, and texts from outside whose signs mean nothing in it.

Numbers and layers as a reader wants them: short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise


def escaped(text: str) -> str:
    """A text whose signs mean nothing in Markdown, nor in the HTML that Markdown lets through."""
    return re.sub(r"[\\`*_{}\[\]<>&|#~!]", r"\\\g<0>", text)


def fenced(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row; bars would end a cell."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    edge = " " if "`" in text else ""
    return f"{fence}{edge}{text}{edge}{fence}".replace("|", "\\|")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is names and whose others are numbers."""
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(value: float) -> str:
    """A number in at most six characters: whole below a hundred thousand, else three figures."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 100_000):
            return f"{value / unit:.3g}{name}"
    if value == round(value) or size >= 1000:
        return str(round(value))
    return f"{value:.0e}" if size < 0.01 else f"{value:.{3 if size >= 1 else 2}g}"


def spans(numbers: Sequence[int]) -> str:
    """Runs of whole numbers: 0–4, 6, 8–9."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))


def gaps(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The stretches of x over which y is None, each as its first and last x."""
    found: list[tuple[float, float]] = []
    for (x, y), (after, _) in pairwise([*points, *points[-1:]]):
        if y is None and found and found[-1][1] == x:
            found[-1] = (found[-1][0], after)
        elif y is None:
            found.append((x, after))
    return found
