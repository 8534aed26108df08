"""A scheme's page in the terminal: its parts with their papers, and pictures of what they do.

The list of parts and presets in the terminal.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longitude.core.atomic_io import atomic_file
from longitude.core.validate import UserError
from longitude.inspection.rows import Grid, Page, PartRow, PresetRow, Sheet
from longitude.viz.plot import (
    DASHED,
    DIM,
    DOTTED,
    MARGIN,
    SOLID,
    SPARSE,
    Canvas,
    Line,
    Pattern,
    Plot,
    Point,
    draw,
    left,
)
from longitude.viz.text import short, spans

GAP = 2
INSIDE = ("frequencies", "remap", "decay")  # written inside a rotation
HEADS: tuple[tuple[str, Pattern], ...] = (
    ("cyan", SOLID),
    ("yellow", DASHED),
    ("magenta", SPARSE),
    ("green", DOTTED),
)


def show(page: Page, console: Console) -> None:
    """Print the whole page."""
    console.print(Text(page.written, style="bold cyan"), soft_wrap=True)
    trained = f", trained at {page.trained}" if page.trained else ""
    sizes = f"{page.length} tokens, {page.heads} heads of {page.dim} dimensions{trained}"
    console.print(Text(sizes, style=DIM))
    for sheet in page.sheets:
        console.print()
        if sheet.layers:
            noun = "layer" if len(sheet.layers) == 1 else "layers"
            head = Text(f"{noun} {spans(sheet.layers)}  ", style="bold")
            console.print(head + Text(sheet.written, style="cyan"), soft_wrap=True)
        console.print(parts_table(sheet.parts))
        for row in side_by_side(list(pictures(sheet, page)), console.width):
            console.print()
            console.print(row)
        for note in sheet.notes:
            console.print(Text(note, style=DIM))


def parts_table(parts: tuple[PartRow, ...]) -> Table:
    """The parts of one scheme, those inside a rotation set in."""
    table = Table.grid(padding=(0, GAP))
    table.add_column(style=DIM, no_wrap=True)
    table.add_column(style="cyan", overflow="fold")
    table.add_column(overflow="fold")
    for p in parts:
        table.add_row(f"  {p.site}" if p.site in INSIDE else p.site, p.written, p.paper)
    return table


def pictures(sheet: Sheet, page: Page) -> Iterator[Plot | Grid]:
    """What there is to draw, in the order in which position enters."""
    if sheet.distances:
        yield distance_map(sheet, page)
    if sheet.decay:
        yield decay_curve(sheet)
    if sheet.wavelengths:
        yield wavelength_plot(sheet, page)
    if sheet.scale:
        yield scale_curve(sheet)
    if sheet.bias:
        yield bias_curves(sheet)
    yield sheet.visible


def distance_map(sheet: Sheet, page: Page) -> Plot:
    """Believed against true distance."""
    points: list[Point] = [(r.distance, r.believed) for r in sheet.distances]
    most = max((y for _, y in points if y is not None), default=0)
    end = min(most, page.length - 1)
    same: list[Point] = [(0, 0), (end, end)]
    lines = [Line("true distance", same, DIM, DOTTED)]
    lines += _levels([("trained", page.trained)], page.length - 1, 2 * most)
    lines += [Line(f"believed, at most {short(most)}", points)]
    return Plot("Distance map", "tokens believed, by tokens away", lines)


def decay_curve(sheet: Sheet) -> Plot:
    """The mean cosine by distance, beside plain RoPE's."""
    plain: list[Point] = [(r.distance, r.plain) for r in sheet.decay]
    ours: list[Point] = [(r.distance, r.mean) for r in sheet.decay]
    lines = [Line("this scheme", ours)]
    if any(a != b for a, b in zip(plain, ours, strict=True)):
        lines = [Line("plain rope", plain, DIM, DOTTED), *lines]
    return Plot("Decay", "mean cosine, by tokens away (log)", lines, x_ratios=True)


def wavelength_plot(sheet: Sheet, page: Page) -> Plot:
    """Wavelengths by pair, plain and scaled, against the length."""
    rows, last = sheet.wavelengths, len(sheet.wavelengths) - 1
    plain: list[Point] = [(w.pair, w.plain) for w in rows]
    scaled: list[Point] = [(w.pair, w.scaled) for w in rows]
    longest = max([w.plain for w in rows] + [w.scaled or 0 for w in rows])
    lines = _levels([("trained", page.trained), ("length", page.length)], last, longest)
    lines += [Line("plain rope", plain, DIM, DOTTED)] if plain != scaled else []
    lines += [Line("wavelength", scaled)]
    counts = Counter(w.state for w in rows)
    states = ", ".join(f"{n} {state}" for state, n in counts.items())
    axes = "tokens a turn (log), by rotary pair"
    notes = (states,) if plain != scaled else ()
    return Plot("Wavelengths", axes, lines, y_ratios=True, notes=notes)


def scale_curve(sheet: Sheet) -> Plot:
    """The factor on queries by position."""
    points: list[Point] = [(r.position, r.factor) for r in sheet.scale]
    return Plot("Query scale", "factor on logits, by position", [Line("", points)])


def bias_curves(sheet: Sheet) -> Plot:
    """What a few heads add, by distance."""
    heads = sorted({r.head for r in sheet.bias})
    curves: dict[int, list[Point]] = {h: [] for h in heads}
    for r in sheet.bias:
        curves[r.head].append((r.distance, r.bias))
    lines = [
        Line(f"head {h}", curves[h], *HEADS[n % len(HEADS)])
        for n, h in reversed([*enumerate(heads)])
    ]
    axes = "added to scores, by tokens away (log)"
    return Plot("Bias", axes, lines, x_ratios=True, y_ratios=True)


def visible_pairs(grid: Grid) -> Group:
    """Which pairs are seen: full where at their true distance, in half-tone where not."""
    count = len(grid.tokens)
    canvas = Canvas((count + 1) // 2, (count + 3) // 4)
    moved = False
    for y, (i, line) in enumerate(zip(grid.tokens, grid.believed, strict=True)):
        for x, (j, told) in enumerate(zip(grid.tokens, line, strict=True)):
            if told is None:
                continue
            true = told == i - j
            moved = moved or not true
            if true or (x + y) % 2 == 0:
                canvas.dot(x, y, "cyan" if true else "yellow")
    ends = {0: "0", canvas.height - 1: short(grid.tokens[-1])}
    side = [left(ends.get(n, "")) + row for n, row in enumerate(canvas.rows())]
    floor = Text(" " * MARGIN + "└" + "─" * canvas.width, DIM)
    numbers = Text(" " * (MARGIN + 1) + f"0{ends[canvas.height - 1]:>{canvas.width - 1}}", DIM)
    legend = [Text(" " * (MARGIN + 1)) + Text("⣿", "cyan") + Text(" seen, at its true distance")]
    legend += [Text(" " * (MARGIN + 1)) + Text("⢕", "yellow") + Text(" seen, believed elsewhere")]
    return Group(
        Text("Visible pairs", style="bold"),
        Text("queries down, keys across", style=DIM),
        *side,
        floor,
        numbers,
        *(legend if moved else legend[:1]),
    )


def _levels(marks: list[tuple[str, int | None]], wide: float, high: float) -> list[Line]:
    """Level strokes at lengths worth comparing with, as far as they lie in the picture."""
    looks = {"trained": ("green", SPARSE), "length": ("magenta", DASHED)}
    return [
        Line(f"{name} {short(at)}", [(0, at), (wide, at)], *looks[name])
        for name, at in marks
        if at and at <= high
    ]


def side_by_side(pictures: Sequence[Plot | Grid], width: int) -> Iterator[RenderableType]:
    """Two pictures a row where the terminal is wide enough."""
    each = (width - GAP) // 2 if width >= 72 else width
    across = 2 if width >= 72 else 1
    for first in range(0, len(pictures), across):
        row = Table.grid(padding=(0, GAP, 0, 0))
        drawn = [_drawn(p, min(each, 60)) for p in pictures[first : first + across]]
        for _ in drawn:
            row.add_column(width=min(each, 60))
        row.add_row(*drawn)
        yield row


def _drawn(picture: Plot | Grid, width: int) -> RenderableType:
    return draw(picture, width) if isinstance(picture, Plot) else visible_pairs(picture)


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


def render(show: Callable[[Console], None], *, color: bool = False, width: int = 100) -> str:
    """What a function prints on a console, as text."""
    system: Any = "256" if color else None
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=color, color_system=system, highlight=False))
    return out.getvalue().rstrip("\n")


def write_rendered(show: Callable[[Console], None], path: Path) -> Path:
    """What a function prints on a console, as a page (.html) or as Markdown (.md)."""
    if path.suffix == ".html":
        console = Console(file=io.StringIO(), width=100, record=True, highlight=False)
        show(console)
        text = console.export_html()
    elif path.suffix == ".md":
        text = f"```\n{render(show)}\n```\n"
    else:
        raise UserError(f"a report can't be written to {path}: end its name in .html or .md.")
    with atomic_file(path) as part:
        part.write_text(text, encoding="utf-8")
    return path
