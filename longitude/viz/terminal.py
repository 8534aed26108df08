"""Terminal output: tables of numbers, each with an interval and a mark (Markdown and pages use them
too); a scheme's parts with their papers and plots; and the catalogue of parts and presets."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longitude.core.validate import UserError
from longitude.inspection.rows import Grid, Page, PartRow, PresetRow, Sheet
from longitude.viz import plot as p
from longitude.viz.plot import DIM, GAP, Line, Plot, Point
from longitude.viz.text import NOTHING, cut, short, spans

BEST, TIED = "best", "tied"
NEAR = "≈"  # before a number that is not significantly different from the best
INSIDE = ("frequencies", "remap", "decay", "axes")  # sites of parts that are written inside rope(…)
STROKES = (("cyan", p.SOLID), ("yellow", p.DASHED), ("magenta", p.SPARSE), ("green", p.DOTTED))


@dataclass(frozen=True)
class Cell:
    """A table cell: a number as printed, its interval, a mark if it is best or tied for best, the
    reason if it is missing, and a sign that refers to a note."""

    value: str
    interval: str = ""
    mark: str = ""
    reason: str | None = None
    sign: str = ""

    def markdown(self) -> str:
        """Format the cell for a Markdown table, the best in bold."""
        value = f"**{self.value}**" if self.mark == BEST else self.value
        near = f"{NEAR} " if self.mark == TIED else ""
        plain = self.interval.startswith("±") or not self.interval
        interval = self.interval if plain else f"({self.interval})"
        return f"{near}{value}{self.sign} {interval}".rstrip()

    def text(self, star: bool = False, interval: bool = False, between: str = "") -> Text:
        """Format the cell for the terminal: the best in bold, or with a star if styles are off."""
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
    """A table without rules: names (at most `names` characters wide), then columns of numbers."""
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
    """A grid of names with one or two columns of text beside them."""
    table = Table.grid(padding=(0, GAP))
    listed = [*rows]
    table.add_column(style=style, no_wrap=True)
    for n in range(1, max(map(len, listed), default=2)):
        table.add_column(overflow="fold", style="cyan" if n == 1 and len(listed[0]) > 2 else "")
    for name, *texts in listed:
        table.add_row(f"{indent}{name}", *map(Text, texts))
    return table


def render(show: Callable[[Console], None], *, color: bool = False, width: int = 100) -> str:
    """Return as text what a function prints on a console."""
    system: Any = "256" if color else None
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=color, color_system=system, highlight=False))
    return out.getvalue().rstrip("\n")


def write_rendered(show: Callable[[Console], None], path: Path) -> Path:
    """Write what a function prints on a console: a page (.html), Markdown (.md) or text (.txt)."""
    from longitude.viz.files import replace_file

    if path.suffix == ".html":
        console = Console(file=io.StringIO(), width=100, record=True, highlight=False)
        show(console)
        text = console.export_html()
    elif path.suffix in (".md", ".txt"):
        fence = "```\n" if path.suffix == ".md" else ""
        text = f"{fence}{render(show)}\n{fence}"
    else:
        raise UserError(f"a report can't be written to {path}: end its name in .html, .md or .txt.")
    replace_file(path, text.encode())
    return path


def show(page: Page, console: Console) -> None:
    """Print a scheme's parts, and plots of what they do."""
    trained = f", trained at {page.trained}" if page.trained else ""
    sizes = f"{page.length} tokens, {page.heads} heads of {page.dim} dimensions{trained}"
    heading(page.written, sizes, console)
    for sheet in page.sheets:
        console.print()
        layer_heading(sheet, console)
        rows = [("  " * (q.site in INSIDE) + q.site, q.written, q.paper) for q in sheet.parts]
        console.print(facts(rows))
        p.side_by_side([*_plots(sheet, page)], console)
        for note in sheet.notes:
            console.print(Text(note, style=DIM))


def heading(title: str, sizes: str, console: Console) -> None:
    """Print a scheme and the sizes that it is drawn for."""
    console.print(Text(title, style="bold cyan"), soft_wrap=True)
    console.print(Text(sizes, style=DIM))


def layer_heading(sheet: Any, console: Console) -> None:
    """Print which layers use a scheme, if layers differ."""
    if sheet.layers:
        noun = "layer" if len(sheet.layers) == 1 else "layers"
        head = Text(f"{noun} {spans(sheet.layers)}  ", style="bold")
        console.print(head + Text(sheet.written, style="cyan"), soft_wrap=True)


def catalogue(parts: Sequence[PartRow], presets: Sequence[PresetRow], console: Console) -> None:
    """Print parts under their sites, then presets."""

    def entry(call: str, lines: list[str], paper: str) -> None:
        console.print(Padding.indent(Text(call, style="cyan"), 2))
        for line in [*map(Text, lines), Text(paper, style=DIM)]:
            console.print(Padding.indent(line, 6))

    for site, rows in groupby(parts, key=lambda part: part.site):
        console.print(Text(site, style="bold"))
        for part in rows:
            entry(part.written, [part.meaning], part.paper)
    if presets:
        console.print(Text("presets", style="bold"))
    for preset in presets:
        same = [f"= {cut(preset.scheme)}"] if preset.scheme else []
        entry(preset.call, [preset.meaning, *same], preset.paper)


def _plots(sheet: Sheet, page: Page) -> Iterator[Plot | Group]:
    """The plots that the sheet has rows for, in the order in which position enters a model."""
    if sheet.distances:
        points = [(r.distance, r.believed) for r in sheet.distances]
        largest = max((y for _, y in points if y is not None), default=0)
        end = min(largest, page.length - 1)
        lines = [Line("true distance", [(0, 0), (end, end)], DIM, p.DOTTED)]
        lines += _levels({"trained": page.trained}, page.length - 1, 2 * largest)
        lines += [Line(f"effective, at most {short(largest)}", points)]
        yield Plot("Distance map", "effective distance, by true distance (tokens)", lines)
    if sheet.decay:
        yield decay_plot(sheet)
    if sheet.wavelengths:
        yield wavelength_plot(sheet, page)
    if sheet.scale:
        line = Line("", [(r.position, r.factor) for r in sheet.scale])
        yield Plot("Query scale", "factor on logits, by position", [line])
    if sheet.bias:
        heads = sorted({r.head for r in sheet.bias})
        lines = [
            Line(f"head {h}", [(r.distance, r.bias) for r in sheet.bias if r.head == h], *stroke)
            for h, stroke in zip(heads, STROKES, strict=False)
        ]
        axes = "added to scores, by distance (log)"
        yield Plot("Bias", axes, lines[::-1], x_log=True, y_log=True)
    yield _visible_pairs(sheet.visible)


def decay_plot(sheet: Sheet) -> Plot:
    """Plot the mean cosine by distance, beside unscaled RoPE's."""
    points = [(r.distance, r.mean) for r in sheet.decay]
    lines = _beside([(r.distance, r.plain) for r in sheet.decay], "this scheme", points)
    return Plot("Decay", "mean cosine, by distance (log)", lines, x_log=True)


def wavelength_plot(sheet: Sheet, page: Page) -> Plot:
    """Plot each pair's wavelength, unscaled and scaled, beside the trained window and length."""
    rows = sheet.wavelengths
    levels = {"trained": page.trained, "length": page.length}
    longest = max([w.plain for w in rows] + [w.scaled or 0 for w in rows])
    points = [(w.pair, w.scaled) for w in rows]
    lines = _beside([(w.pair, w.plain) for w in rows], "wavelength", points)
    states = ", ".join(f"{n} {state}" for state, n in Counter(w.state for w in rows).items())
    notes = [states] if len(lines) > 1 else ()
    lines = _levels(levels, len(rows) - 1, longest) + lines
    axes = "tokens per rotation (log), by rotary pair"
    return Plot("Wavelengths", axes, lines, y_log=True, notes=notes)


def _beside(unscaled: Sequence[Point], name: str, points: Sequence[Point]) -> list[Line]:
    """The curve of the scheme, preceded by unscaled RoPE's if the two differ."""
    dotted = [Line("unscaled rope", unscaled, DIM, p.DOTTED)] if unscaled != points else []
    return [*dotted, Line(name, points)]


def _levels(marks: dict[str, int | None], wide: float, high: float) -> list[Line]:
    """Horizontal reference lines at the lengths in `marks` that lie within the plot."""
    looks = {"trained": ("green", p.SPARSE), "length": ("magenta", p.DASHED)}
    return [
        Line(f"{name} {short(at)}", [(0, at), (wide, at)], *looks[name])
        for name, at in marks.items()
        if at and at <= high
    ]


def _visible_pairs(grid: Grid) -> Group:
    """Draw which pairs are visible: solid at their true distance, in half-tone at another one."""
    count = len(grid.tokens)
    canvas = p.Canvas((count + 1) // 2, (count + 3) // 4)
    legend = {"cyan": "⣿ visible, at its true distance"}
    for y, (i, line) in enumerate(zip(grid.tokens, grid.believed, strict=True)):
        for x, (j, distance) in enumerate(zip(grid.tokens, line, strict=True)):
            if distance is not None and distance != i - j:
                legend["yellow"] = "⢕ visible, at another distance"
            if distance == i - j or (distance is not None and (x + y) % 2 == 0):
                canvas.dot(x, y, "cyan" if distance == i - j else "yellow")
    end, indent = short(grid.tokens[-1]), " " * (p.MARGIN + 1)
    numbers = {0: "0", canvas.height - 1: end}
    return Group(
        Text("Visible pairs", style="bold"),
        Text("queries down, keys across", style=DIM),
        *(p.left(numbers.get(n, "")) + row for n, row in enumerate(canvas.rows())),
        Text(" " * p.MARGIN + "└" + "─" * canvas.width, DIM),
        Text(f"{indent}0{end:>{canvas.width - 1}}", DIM),
        *(Text(indent) + Text(text[0], style) + Text(text[1:]) for style, text in legend.items()),
    )
