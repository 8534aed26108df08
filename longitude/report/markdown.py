"""Markdown: tables, and texts from outside whose signs mean nothing in it."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
