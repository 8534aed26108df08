"""Schemes in the terminal: their parts with papers and plots of what they do, and the catalogue."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from longitude.core.validate import UserError
from longitude.inspection.rows import Grid, Page, PartRow, PresetRow, Sheet
from longitude.viz import plot as p
from longitude.viz.plot import DIM, Line, Plot, Point
from longitude.viz.table import facts
from longitude.viz.text import cut, short, spans

INSIDE = ("frequencies", "remap", "decay", "axes")  # written inside a rotation
STROKES = (("cyan", p.SOLID), ("yellow", p.DASHED), ("magenta", p.SPARSE), ("green", p.DOTTED))


def render(show: Callable[[Console], None], *, color: bool = False, width: int = 100) -> str:
    """What a function prints on a console, as text."""
    system: Any = "256" if color else None
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=color, color_system=system, highlight=False))
    return out.getvalue().rstrip("\n")


def write_rendered(show: Callable[[Console], None], path: Path) -> Path:
    """Write what a function prints on a console as a page (.html) or as Markdown (.md)."""
    from longitude.viz.files import replace_file

    if path.suffix == ".html":
        console = Console(file=io.StringIO(), width=100, record=True, highlight=False)
        show(console)
        text = console.export_html()
    elif path.suffix == ".md":
        text = f"```\n{render(show)}\n```\n"
    else:
        raise UserError(f"a report can't be written to {path}: end its name in .html or .md.")
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
    """A scheme, and the sizes that it is drawn for."""
    console.print(Text(title, style="bold cyan"), soft_wrap=True)
    console.print(Text(sizes, style=DIM))


def layer_heading(sheet: Any, console: Console) -> None:
    """The layers that use a scheme, where layers differ."""
    if sheet.layers:
        noun = "layer" if len(sheet.layers) == 1 else "layers"
        head = Text(f"{noun} {spans(sheet.layers)}  ", style="bold")
        console.print(head + Text(sheet.written, style="cyan"), soft_wrap=True)


def catalogue(parts: Sequence[PartRow], presets: Sequence[PresetRow], console: Console) -> None:
    """Print parts under their sites, then presets."""

    def entry(call: str, lines: list[str], paper: str) -> None:
        console.print(Padding(Text(call, style="cyan"), (0, 0, 0, 2), expand=False))
        for line in [*map(Text, lines), Text(paper, style=DIM)]:
            console.print(Padding(line, (0, 0, 0, 6), expand=False))

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
    """What there is to draw, in the order in which position enters."""
    if sheet.distances:
        points = [(r.distance, r.believed) for r in sheet.distances]
        most = max((y for _, y in points if y is not None), default=0)
        end = min(most, page.length - 1)
        lines = [Line("true distance", [(0, 0), (end, end)], DIM, p.DOTTED)]
        lines += _levels({"trained": page.trained}, page.length - 1, 2 * most)
        lines += [Line(f"effective, at most {short(most)}", points)]
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
            Line(f"head {h}", [(r.distance, r.bias) for r in sheet.bias if r.head == h], *look)
            for h, look in zip(heads, STROKES, strict=False)
        ]
        axes = "added to scores, by distance (log)"
        yield Plot("Bias", axes, lines[::-1], x_log=True, y_log=True)
    yield _visible_pairs(sheet.visible)


def decay_plot(sheet: Sheet) -> Plot:
    """The mean cosine by distance, beside unscaled RoPE's."""
    unscaled = [(r.distance, r.plain) for r in sheet.decay]
    lines = _beside(unscaled, "this scheme", [(r.distance, r.mean) for r in sheet.decay])
    return Plot("Decay", "mean cosine, by distance (log)", lines, x_log=True)


def wavelength_plot(sheet: Sheet, page: Page) -> Plot:
    """Wavelengths by pair, unscaled and scaled, against the length."""
    rows = sheet.wavelengths
    levels = {"trained": page.trained, "length": page.length}
    longest = max([w.plain for w in rows] + [w.scaled or 0 for w in rows])
    lines = _beside(
        [(w.pair, w.plain) for w in rows], "wavelength", [(w.pair, w.scaled) for w in rows]
    )
    states = ", ".join(f"{n} {state}" for state, n in Counter(w.state for w in rows).items())
    return Plot(
        "Wavelengths",
        "tokens per rotation (log), by rotary pair",
        _levels(levels, len(rows) - 1, longest) + lines,
        y_log=True,
        notes=[states] if len(lines) > 1 else (),
    )


def _beside(unscaled: Sequence[Point], name: str, points: Sequence[Point]) -> list[Line]:
    """A curve of the scheme, and unscaled RoPE's where it differs."""
    dotted = [Line("unscaled rope", unscaled, DIM, p.DOTTED)] if unscaled != points else []
    return [*dotted, Line(name, points)]


def _levels(marks: dict[str, int | None], wide: float, high: float) -> list[Line]:
    """Horizontal lines at lengths to compare with, as far as they lie in the plot."""
    looks = {"trained": ("green", p.SPARSE), "length": ("magenta", p.DASHED)}
    return [
        Line(f"{name} {short(at)}", [(0, at), (wide, at)], *looks[name])
        for name, at in marks.items()
        if at and at <= high
    ]


def _visible_pairs(grid: Grid) -> Group:
    """Which pairs are visible: full where at their true distance, in half-tone where not."""
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
