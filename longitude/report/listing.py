"""The list of parts and presets in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from longitude.inspect.rows import PartRow, PresetRow
from longitude.report.plot import DIM

LONGEST = 140


def listing(parts: Iterable[PartRow], presets: Iterable[PresetRow], console: Console) -> None:
    """Parts under their sites, then presets."""
    for site, rows in groupby(parts, key=lambda p: p.site):
        console.print(Text(site, style="bold"))
        for p in rows:
            _entry(console, p.written, [p.meaning], p.paper)
    named = list(presets)
    if named:
        console.print(Text("presets", style="bold"))
    for p in named:
        same = [f"= {cut(p.scheme)}"] if p.scheme else []
        _entry(console, p.call, [p.meaning, *same], p.paper)


def cut(text: str) -> str:
    """A text that may name a hundred layers, short enough for a list."""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _entry(console: Console, call: str, lines: list[str], paper: str) -> None:
    console.print(_indented(Text(call, style="cyan"), 2))
    for line in [*map(Text, lines), Text(paper, style=DIM)]:
        console.print(_indented(line, 6))


def _indented(text: Text, by: int) -> Padding:
    return Padding(text, (0, 0, 0, by), expand=False)
