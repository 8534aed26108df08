"""`longitude inspect` in the terminal: what a configuration says about positions, what follows from
it, and the attention scores that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.inspection.rows import SINK, USES, Band, HeadRow, LayerRow, ScoreStatistics
from longitude.viz import plot as p
from longitude.viz.plot import DIM, Line, Plot
from longitude.viz.table import facts, rich_table
from longitude.viz.terminal import decay_plot, wavelength_plot
from longitude.viz.text import NOTHING, cut, short, spans

if TYPE_CHECKING:
    from longitude.hf.encodings import Encoding, KnownModel
    from longitude.inspection.api import InspectResult
    from longitude.inspection.rope_limits import RopeLimits

BLOCKS = "·▁▂▃▄▅▆▇█"
STYLES = (("cyan", p.SOLID), ("yellow", p.DASHED), ("magenta", p.SPARSE))
LEGEND = (  # of the table of layers; the second and third where queries and keys can be moved
    "scores: minimum … maximum",
    "moved: maximum with the text's own queries and keys at distances inside and past the window",
    "bound: what no distance can exceed",
    "away: mean distance of attention",
    "position: share of the variance of scores that distance explains, one block per head",
    "sink: attention on the first token, one block per head",
)


def show(result: InspectResult, meanings: dict[str, str], console: Console) -> None:
    """Print everything about one checkpoint's configuration."""
    console.print(Text(result.name, style="bold"))
    for encoding in result.encodings:
        console.print()
        title = f"{encoding.part}: {encoding.kind}" if encoding.part else encoding.kind
        console.print(Text(title, style="bold cyan") + Text(f"  {meanings[encoding.kind]}", DIM))
        console.print(facts(_facts(encoding), indent="  "))
    if result.reach:
        console.print()
        console.print(facts(_limits(result.reach), indent="  "))
    plots: list[Plot] = []
    for sheet in result.page.sheets[:3] if result.page else ():
        plots += [wavelength_plot(sheet, result.page)] if sheet.wavelengths and result.page else []
        plots += [decay_plot(sheet)] if sheet.decay else []
    p.side_by_side(plots, console)
    for fault in result.faults:
        style = "bold red" if fault.serious else "bold yellow"
        console.print()
        console.print(Text(f"{fault.name}: ", style=style) + Text(fault.sentence))


def _facts(e: Encoding) -> Iterator[tuple[str, str]]:
    """What is known of one encoding, a line each."""
    if e.scheme and not e.layers:
        yield "scheme", cut(e.scheme)
    if e.base:
        yield "base", f"{e.base:,.10g}"
    if e.pairs and e.kind == "rope":
        layout = "half a head apart" if e.pairs == "half" else "side by side"
        share = "" if e.fraction in (None, 1) else f", in {e.fraction:.4g} of each head"
        yield "pairs", f"{e.pairs} ({layout}){share}"
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
        yield "source", e.where
    for note in e.notes:
        yield "note", note


def _limits(r: RopeLimits) -> Iterator[tuple[str, str]]:
    """How far a rotation reaches, by each law."""
    partial = f"{r.unfinished} of {r.dim // 2} pairs don't complete a rotation in the window"
    yield "wavelengths", f"up to {short(r.longest)} tokens; {partial}"
    seen = f"{r.critical_dimension} of {r.dim} saw a full rotation in {r.trained:,} tokens"
    yield "critical dimension", seen
    yield "extrapolation limit", f"{r.limit:,.0f} tokens with this base alone"
    if r.least_base:
        yield "smallest base", f"{short(r.least_base)} for the window; it has {short(r.base)}"
    far = "at every distance in the window" if r.against is None else f"up to {r.against:,} away"
    yield "keys like the query", f"score above others {far} (Σ cos >= 0)"
    if r.target and r.critical_base:
        least = f"; smallest base {short(r.target_least_base)}" if r.target_least_base else ""
        yield f"to {r.target:,}", f"critical base {short(r.critical_base)}{least}"


def table(models: Iterable[KnownModel], console: Console) -> None:
    """Print every known model, a line for each of its encodings."""
    grid = Table(box=None, pad_edge=False)
    for head in ("model", "encoding", "scheme", "window"):
        grid.add_column(head, overflow="fold")
    for model in models:
        for n, e in enumerate(model.encodings):
            kind = f"{e.kind} ({e.part})" if e.part else e.kind
            scheme = e.scheme or ""
            if len(scheme) > 60:  # each scheme of layers that differ, once
                scheme = "; ".join(dict.fromkeys(what for what, _ in e.layers)) or cut(scheme)
            window = f"{e.window:,}" if e.window else ""
            grid.add_row(model.name if n == 0 else "", kind, scheme, window)
        if model.note:
            grid.add_row("", "", Text(model.note, style=DIM), "")
    console.print(grid)


def show_scores(measured: ScoreStatistics, console: Console) -> None:
    """Print the layers' table, curves by distance, and the four terms where there are some."""
    window = f"; window {measured.trained:,}" if measured.trained else ""
    head = f"{measured.queries} queries of {measured.length:,} tokens of {measured.text}{window}"
    console.print(Text("Attention scores", style="bold"))
    console.print(Text(head, style=DIM))
    console.print(_layers(measured.layers))
    moved = any(h.moved for row in measured.layers for h in row.heads)
    legend = LEGEND if moved else (LEGEND[0], *LEGEND[3:])
    console.print(Text("; ".join(legend), style=DIM))
    p.side_by_side([_mean_score(measured), attention_by_distance(measured)], console)
    sentences = [*_sentences(measured)]
    if measured.terms:
        console.print()
        console.print(Text(f"The four terms of layer {measured.terms.layer}'s scores", "bold"))
        every = [(h.head, (*h.terms, h.whole)) for h in measured.terms.heads]
        heads = ["head", *(t.name.replace("–", "–\n") for t in every[0][1])]
        rows = [(str(head), *(f"{t.felt:.2f}" for t in terms)) for head, terms in every]
        console.print(rich_table(heads, rows, first="right"))
        sentences += [
            "Terms are in units of scores, with each query's mean removed, as softmax ignores it. "
            "Constants count as content."
        ]
    for sentence in (*sentences, *measured.notes):
        console.print(Text(sentence, style=DIM))


def _layers(rows: Sequence[LayerRow]) -> Table:
    """A line for each layer, a block for each of its heads."""
    past = any(h.past for row in rows for h in row.heads)
    moved = any(h.moved for row in rows for h in row.heads)
    heads = ["layer", "scores\ninside", *(["scores\npast"] if past else [])]
    heads += ["moved\ninside", "moved\npast", "bound"] if moved else []
    grid = rich_table([*heads, "away"], [], first="right")
    for head in ("position", "sink"):
        grid.add_column(head, overflow="fold", min_width=8)  # many heads take several lines
    for row in rows:
        cells = [str(row.layer), _range([h.inside for h in row.heads])]
        cells += [_range([h.past for h in row.heads if h.past])] if past else []
        cells += _moved(row.heads) if moved else []
        cells += [f"{sum(h.away for h in row.heads) / len(row.heads):.0f}"]
        grid.add_row(*cells, *(_blocks(row.heads, name) for name in ("position", "sink")))
    return grid


def _sentences(measured: ScoreStatistics) -> Iterator[str]:
    """Which heads use position, and which are sinks."""
    every = [(f"{row.layer}.{h.head}", h) for row in measured.layers for h in row.heads]
    uses = [name for name, h in every if h.uses_position]
    sinks = [name for name, h in every if h.is_sink]

    def some(names: list[str], most: int = 8) -> str:
        more = ", …" if len(names) > most else ""
        return f": {', '.join(names[:most])}{more}." if names else "."

    share = f"(distance explains {USES:.0%} or more)"
    yield f"{len(uses)} of {len(every)} heads use position {share}{some(uses)}"
    what = f"leave {SINK:.0%} or more of their attention on the first token"
    yield f"{len(sinks)} {what}{some(sinks)}"


def _mean_score(measured: ScoreStatistics) -> Plot:
    """The mean score by distance."""
    lines = [
        Line(
            f"layer {row.layer}",
            [
                (one.distance, sum(h.bins[n].scores.mean for h in row.heads) / len(row.heads))
                for n, one in enumerate(row.heads[0].bins)
            ],
            *style,
        )
        for row, style in _chosen(measured)
    ]
    return Plot("Mean score", "by distance (log)", lines, x_log=True, mark=_window(measured))


def attention_by_distance(measured: ScoreStatistics) -> Plot:
    """The share of attention up to each distance."""
    lines = []
    for row, style in _chosen(measured):
        ends = [*(b.distance - 1 for b in row.heads[0].bins[1:]), measured.length - 1]
        total, points = 0.0, []
        for n, end in enumerate(ends):
            total += sum(h.bins[n].scores.mass for h in row.heads) / len(row.heads)
            points.append((end, total))
        lines.append(Line(f"layer {row.layer}", points, *style))
    mark = _window(measured)
    axes = "cumulative share, by distance (log)"
    return Plot("Attention", axes, lines, x_log=True, mark=mark, y_ends=(0.0, 1.0))


def _window(measured: ScoreStatistics) -> tuple[str, float] | None:
    trained = measured.trained
    return ("trained", float(trained)) if trained and trained < measured.length else None


def _chosen(measured: ScoreStatistics) -> Iterator[tuple[LayerRow, tuple[str, p.Pattern]]]:
    """The first, the middle and the last layer, each in a style of its own."""
    rows = measured.layers
    indices = dict.fromkeys((0, len(rows) // 2, len(rows) - 1))
    return zip((rows[n] for n in indices), STYLES, strict=False)


def _moved(heads: Sequence[HeadRow]) -> list[str]:
    every = [(m.inside, m.past, m.ceiling) for h in heads if (m := h.moved)]
    return [f"{max(x):.1f}" for x in zip(*every, strict=True)] or [NOTHING] * 3


def _range(bands: Sequence[Band]) -> str:
    if not bands:
        return NOTHING
    return f"{min(b.least for b in bands):.1f} … {max(b.greatest for b in bands):.1f}"


def _blocks(heads: Sequence[HeadRow], name: str) -> str:
    """A block for each head's share, 0 to 1; any share above 2 % is visible."""
    shares = [getattr(h, name) for h in heads]
    return "".join(BLOCKS[min(8, max(int(s > 0.02), round(s * 8)))] for s in shares)
