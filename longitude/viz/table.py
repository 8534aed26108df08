"""Tables of results: numbers with an interval and a mark, for the terminal, Markdown and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from longitude.viz.plot import DIM, GAP
from longitude.viz.text import NOTHING

BEST, TIED = "best", "tied"
NEAR = "≈"  # before a number that is not significantly different from the best


@dataclass(frozen=True)
class Cell:
    """A number as printed, its interval, whether it is the best or tied with it, why there is none,
    and a sign that refers to a note."""

    value: str
    interval: str = ""
    mark: str = ""
    reason: str | None = None
    sign: str = ""

    def markdown(self) -> str:
        """For a Markdown table: the best in bold."""
        value = f"**{self.value}**" if self.mark == BEST else self.value
        near = f"{NEAR} " if self.mark == TIED else ""
        plain = self.interval.startswith("±") or not self.interval
        interval = self.interval if plain else f"({self.interval})"
        return f"{near}{value}{self.sign} {interval}".rstrip()

    def text(self, star: bool = False, interval: bool = False, between: str = "") -> Text:
        """For the terminal: the best in bold, or with a star where there are no styles."""
        prefix = "*" if self.mark == BEST and star else NEAR if self.mark == TIED else ""
        style = "bold" if self.mark == BEST else DIM if self.value == NOTHING else ""
        more = between + self.interval if interval and self.interval else ""
        return Text.assemble((prefix, DIM), (self.value, style), (self.sign, DIM), (more, DIM))


def rich_table(
    heads: Sequence[str | Text],
    rows: Iterable[Sequence[str | Text]],
    names: int | None = None,
    first: str = "left",
) -> Table:
    """A table without lines: names (at most `names` characters wide), then numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    for n, head in enumerate(heads):
        if n == 0 and first == "left":
            table.add_column(head, style="cyan", overflow="fold", max_width=names)
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def facts(rows: Iterable[tuple[str, ...]], style: str = DIM, indent: str = "") -> Table:
    """Names, and one or two columns of text beside them."""
    table = Table.grid(padding=(0, GAP))
    listed = [*rows]
    table.add_column(style=style, no_wrap=True)
    for n in range(1, max(map(len, listed), default=2)):
        table.add_column(overflow="fold", style="cyan" if n == 1 and len(listed[0]) > 2 else "")
    for name, *texts in listed:
        table.add_row(f"{indent}{name}", *map(Text, texts))
    return table
