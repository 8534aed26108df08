"""What a checkpoint's configuration says of positions, in the terminal: facts, laws, pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from longitude.viz.plot import DIM, Plot
from longitude.viz.terminal import cut, decay_curve, side_by_side, wavelength_plot
from longitude.viz.text import short, spans

if TYPE_CHECKING:
    from longitude.hf.encodings import Encoding, KnownModel
    from longitude.inspection.api import InspectResult
    from longitude.inspection.rope_limits import RopeLimits


def show(found: InspectResult, meanings: dict[str, str], console: Console) -> None:
    """Print everything about one checkpoint."""
    console.print(Text(found.name, style="bold"))
    for encoding in found.encodings:
        console.print()
        title = f"{encoding.part}: {encoding.kind}" if encoding.part else encoding.kind
        console.print(Text(title, style="bold cyan") + Text(f"  {meanings[encoding.kind]}", DIM))
        console.print(_grid(facts(encoding)))
    if found.reach:
        console.print()
        console.print(_grid(reaches(found.reach)))
    for row in _pictures(found, console.width):
        console.print()
        console.print(row)
    for fault in found.faults:
        style = "bold red" if fault.serious else "bold yellow"
        console.print()
        console.print(Text(f"{fault.name}: ", style=style) + Text(fault.sentence))


def facts(e: Encoding) -> Iterator[tuple[str, str]]:
    """What is known of one encoding, a line each."""
    if e.scheme and not e.layers:
        yield "scheme", cut(e.scheme)
    if e.base:
        yield "base", f"{e.base:,.10g}"
    if e.pairs and e.kind == "rope":
        lie = "half a head apart" if e.pairs == "half" else "side by side"
        share = "" if e.fraction in (None, 1) else f", in {e.fraction:.4g} of each head"
        yield "pairs", f"{e.pairs} ({lie}){share}"
    if e.scaling:
        yield "scaling", cut(e.scaling)
    if e.heads and e.head_dim:
        yield "heads", f"{e.heads} of {e.head_dim} dimensions"
    if e.window:
        before = f", {e.original:,} before scaling" if e.original else ""
        yield "window", f"{e.window:,} tokens{before} ({e.window_from})"
    for what, layers in e.layers:
        half, _, scheme = what.partition(": ")
        yield (f"layers {spans(layers)}", cut(what)) if layers else (half, cut(scheme))
    if e.where:
        yield "told by", e.where
    for note in e.notes:
        yield "note", note


def reaches(r: RopeLimits) -> Iterator[tuple[str, str]]:
    """How far a rotation goes, by each law."""
    pairs = r.dim // 2
    still = f"{r.unfinished} of {pairs} pairs don't turn once in the window"
    yield "wavelengths", f"up to {short(r.longest)} tokens; {still}"
    yield (
        "critical dimension",
        f"{r.critical_dimension} of {r.dim} saw a whole turn in {r.trained:,} tokens",
    )
    yield "extrapolation limit", f"{r.limit:,.0f} tokens under this base alone"
    if r.least_base:
        yield "least base", f"{short(r.least_base)} for the window; it has {short(r.base)}"
    far = "at every distance of the window" if r.against is None else f"up to {r.against:,} away"
    yield "keys like the query", f"score above others {far} (Σ cos >= 0)"
    if r.target and r.critical_base:
        least = f"; least base {short(r.target_least_base)}" if r.target_least_base else ""
        yield f"to {r.target:,}", f"critical base {short(r.critical_base)}{least}"


def table(rows: Iterable[KnownModel], console: Console) -> None:
    """Every known model, a line each."""
    grid = Table(box=None, pad_edge=False)
    for head in ("model", "encoding", "scheme", "window"):
        grid.add_column(head, overflow="fold")
    for row in rows:
        first = True
        for e in row.encodings:
            name = row.name if first else ""
            kind = f"{e.kind} ({e.part})" if e.part else e.kind
            window = f"{e.window:,}" if e.window else ""
            written = _several(e) if e.scheme and len(e.scheme) > 60 else e.scheme or ""
            grid.add_row(name, kind, written, window)
            first = False
        if row.note:
            grid.add_row("", "", Text(row.note, style=DIM), "")
    console.print(grid)


def _several(e: Encoding) -> str:
    """Each scheme of layers that differ, once."""
    return "; ".join(dict.fromkeys(what for what, _ in e.layers)) or cut(e.scheme or "")


def _pictures(found: InspectResult, width: int) -> Iterator[RenderableType]:
    if found.page is None:
        return
    plots: list[Plot] = []
    for sheet in found.page.sheets[:3]:
        plots += [wavelength_plot(sheet, found.page)] if sheet.wavelengths else []
        plots += [decay_curve(sheet)] if sheet.decay else []
    yield from side_by_side(plots, width)


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=DIM, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(f"  {name}", value)
    return grid
