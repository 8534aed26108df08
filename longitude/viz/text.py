"""Text for people: short numbers, Markdown, and strings from outside made safe to print."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

NOTHING = "–"  # where there is no value
JOINERS = frozenset("\n\t\u200c\u200d")  # kept: some scripts and emoji need them


def printable(text: str) -> str:
    """The text on one line, without what a terminal would interpret or vl_convert crash on."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def safe_lines(text: str) -> str:
    """Several lines, without escapes, other control characters or bidirectional overrides."""

    def safe(letter: str) -> str:
        if letter.isprintable() or letter in JOINERS:
            return letter
        kind = unicodedata.category(letter)
        return " " if kind.startswith("Z") else "" if kind in ("Cc", "Cf") else "\ufffd"

    return "".join(map(safe, text))


def cut(text: str, most: int = 140) -> str:
    """Truncate a text, which may name a hundred layers, so that it fits a list."""
    return text if len(text) <= most else text[: most - 1] + "…"


def escaped(text: str) -> str:
    """Escape all characters that Markdown, or the HTML that it lets through, would interpret."""
    return re.sub(r"[\\`*_{}\[\]<>&|#~!]", r"\\\g<0>", text)


def fenced(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row; | is escaped, for cells."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    edge = " " if "`" in text else ""
    return f"{fence}{edge}{text}{edge}{fence}".replace("|", "\\|")


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is names and whose others are numbers."""
    lines = [heads, ["---", *("--:" for _ in heads[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(value: float) -> str:
    """Format a number in at most six characters: whole below 100,000, else to three figures."""
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 100_000):
            return f"{value / unit:.3g}{name}"
    if value == round(value) or size >= 1000:
        return str(round(value))
    return f"{value:.0e}" if size < 0.01 else f"{value:.{3 if size >= 1 else 2}g}"


def spans(numbers: Sequence[int]) -> str:
    """Format runs of consecutive integers: 0–4, 6, 8–9."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))


def gaps(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The intervals of x over which y is None, each as its first and last x."""
    missing: list[tuple[float, float]] = []
    for (x, y), (next_x, _) in pairwise([*points, *points[-1:]]):
        if y is None and missing and missing[-1][1] == x:
            missing[-1] = (missing[-1][0], next_x)
        elif y is None:
            missing.append((x, next_x))
    return missing
