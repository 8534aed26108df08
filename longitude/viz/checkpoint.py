"""`longitude inspect`, `lint` and `verify` in the terminal: what a configuration says about
positions and what follows from it, what runtimes compute from it, and measured attention scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longitude.inspection.rows import SINK, USES, Band, LayerRow, ScoreStatistics
from longitude.viz.plot import DIM, Line, Plot, side_by_side
from longitude.viz.terminal import STROKES, decay_plot, facts, rich_table, wavelength_plot
from longitude.viz.text import NOTHING, cut, short, spans

if TYPE_CHECKING:
    from longitude.hf.encodings import Encoding, KnownModel
    from longitude.inspection.api import InspectResult
    from longitude.inspection.rope_limits import RopeLimits
    from longitude.runtimes.lint import LintResult
    from longitude.runtimes.verify import VerifyResult

BLOCKS = "·▁▂▃▄▅▆▇█"
LEGEND = (  # of the table of layers; the second and third only if RoPE can be undone
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
    if page := result.page:
        for sheet in page.sheets[:3]:
            plots += [wavelength_plot(sheet, page)] if sheet.wavelengths else []
            plots += [decay_plot(sheet)] if sheet.decay else []
    side_by_side(plots, console)
    for fault in result.faults:
        style = "bold red" if fault.serious else "bold yellow"
        console.print()
        console.print(Text(f"{fault.name}: ", style=style) + Text(fault.sentence))


def _facts(e: Encoding) -> Iterator[tuple[str, str]]:
    """Yield what is known about one encoding, as pairs of a name and a text."""
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
        scaled = e.original and e.original != e.window
        before = f", {e.original:,} before scaling" if scaled else ""
        yield "window", f"{e.window:,} tokens{before} ({e.window_from})"
    for what, layers in e.layers:
        half, _, scheme = what.partition(": ")
        yield (f"layers {spans(layers)}", cut(what)) if layers else (half, cut(scheme))
    if e.where:
        yield "source", e.where
    for note in e.notes:
        yield "note", note


def _limits(r: RopeLimits) -> Iterator[tuple[str, str]]:
    """Yield how far a rotation reaches, by each formula of rope_limits.py."""
    partial = f"{r.unfinished} of {r.dim // 2} pairs don't complete a rotation in the window"
    yield "wavelengths", f"up to {short(r.longest)} tokens; {partial}"
    seen = f"{r.critical_dimension} of {r.dim} saw a full rotation in {r.trained:,} tokens"
    yield "critical dimension", seen
    yield "extrapolation limit", f"{r.limit:,.0f} tokens with this base alone"
    if r.least_base:
        yield "smallest base", f"{short(r.least_base)} for the window; it has {short(r.base)}"
    where = "at every distance in the window" if r.against is None else f"up to {r.against:,} away"
    yield "keys like the query", f"score above others {where} (Σ cos >= 0)"
    if r.target and r.critical_base:
        smallest = f"; smallest base {short(r.target_least_base)}" if r.target_least_base else ""
        yield f"to {r.target:,}", f"critical base {short(r.critical_base)}{smallest}"


def table(models: Iterable[KnownModel], console: Console) -> None:
    """Print every known model, one line per encoding."""
    grid = Table(box=None, pad_edge=False)
    for head in ("model", "encoding", "scheme", "window"):
        grid.add_column(head, overflow="fold")
    for model in models:
        for n, e in enumerate(model.encodings):
            kind = f"{e.kind} ({e.part})" if e.part else e.kind
            scheme = e.scheme or ""
            if len(scheme) > 60:  # where layers differ, each scheme once
                scheme = "; ".join(dict.fromkeys(what for what, _ in e.layers)) or cut(scheme)
            window = f"{e.window:,}" if e.window else ""
            grid.add_row(model.name if n == 0 else "", kind, scheme, window)
        if model.note:
            grid.add_row("", "", Text(model.note, style=DIM), "")
    console.print(grid)


def show_lint(found: LintResult, console: Console) -> None:
    """Print faults, the table and the issues."""
    for fault in found.faults:
        console.print(Text(f"{fault.name}: ", style="bold").append(fault.sentence, style="default"))
    if found.meant.starts:
        table = Table(box=None, pad_edge=False)
        table.add_column("runtime")
        for head in ("frequencies off by", "cos, sin ×", "longest input"):
            table.add_column(head, justify="right")
        meant = found.meant
        table.add_row("meant", "", f"{meant.attention:.4f}", f"{meant.length:,}", style="bold")
        for row in found.rows:
            size, cells = row.difference.frequencies, ["does not start", "", ""]
            if row.difference.starts:
                off = "other pairs" if size > 1e9 else f"{size:.2%}" if size > 1e-6 else NOTHING
                cells = [off, f"{row.found.attention:.4f}", f"{row.found.length:,}"]
            style = "" if row.same else "yellow"
            table.add_row(f"{row.runtime} {row.version}", *cells, style=style)
        console.print(table)
        if meant.remap:
            console.print(Text(f"positions are to be remapped by {meant.remap}"))
    for n, (what, layers) in enumerate(found.layers):
        about = "" if n else ", which the table is about"
        console.print(Text(f"layers {spans(layers)}: {what}{about}"))
    for title, sentence in _lint_issues(found):
        console.print(Text(title, style="bold"))
        console.print(Padding.indent(Text(sentence), 2))
    if found.same:
        console.print(Text("every runtime computes what the settings mean", style="green"))


def _lint_issues(found: LintResult) -> Iterator[tuple[str, str]]:
    """Each issue once, with the runtimes that have it; then notes."""
    for suffix, kind in (("", "issues"), (" (a note)", "notes")):
        by_issue: dict[Any, dict[str, None]] = {}
        for row in found.rows:
            for issue in getattr(row, kind):
                by_issue.setdefault(issue, {})[row.runtime] = None
        for issue, names in by_issue.items():
            yield f"{issue.name}: {', '.join(names)}{suffix}", f"{issue.sentence} → {issue.fix}"
    for issue in found.notes:
        yield f"{issue.name} (a note)", f"{issue.sentence} → {issue.fix}"


def show_verified(result: VerifyResult, console: Console) -> None:
    """Print each runtime's differences, their causes, and what was not run."""
    table = rich_table(["runtime", "tokens", "largest difference", "allowed", ""], [])
    for proof in result.proofs:
        for n, (length, size) in enumerate(proof.rows.items()):
            right = size <= proof.bound(length)
            cells = (f"{length:,}", f"{size:.4f} nats", f"{proof.bound(length):.3f}")
            verdict = Text("same") if right else Text("differs", style="bold red")
            table.add_row("" if n else proof.runtime, *cells, verdict)
    if table.row_count:
        console.print(table)
    for proof in result.proofs:
        if not proof.rows or proof.causes:
            console.print(Text(str(proof), style="" if proof.holds else "yellow"))


def show_scores(measured: ScoreStatistics, console: Console) -> None:
    """Print the table of layers, curves by distance, and the four terms if there are any."""
    window = f"; window {measured.trained:,}" if measured.trained else ""
    head = f"{measured.queries} queries of {measured.length:,} tokens of {measured.text}{window}"
    console.print(Text("Attention scores", style="bold"))
    console.print(Text(head, style=DIM))
    console.print(_layers(measured.layers))
    moved = any(h.moved for row in measured.layers for h in row.heads)
    legend = LEGEND if moved else (LEGEND[0], *LEGEND[3:])
    console.print(Text("; ".join(legend), style=DIM))
    side_by_side(score_plots(measured), console)
    heads_by_name = [(f"{row.layer}.{h.head}", h) for row in measured.layers for h in row.heads]
    uses = [name for name, h in heads_by_name if h.uses_position]
    sinks = [name for name, h in heads_by_name if h.sink >= SINK]
    by_use, rest = f"(distance explains {USES:.0%} or more)", f"leave {SINK:.0%} or more of their"
    sentences = [
        f"{len(uses)} of {len(heads_by_name)} heads use position {by_use}{_first_names(uses)}",
        f"{len(sinks)} {rest} attention on the first token{_first_names(sinks)}",
    ]
    if measured.terms:
        console.print()
        console.print(Text(f"The four terms of layer {measured.terms.layer}'s scores", "bold"))
        terms = {str(h.head): (*h.terms, h.whole) for h in measured.terms.heads}
        heads = ["head", *(t.name.replace("–", "–\n") for t in next(iter(terms.values())))]
        rows = [(head, *(f"{t.felt:.2f}" for t in each)) for head, each in terms.items()]
        console.print(rich_table(heads, rows, first="right"))
        units = "Terms are in units of scores, with each query's mean removed, as softmax ignores"
        sentences += [f"{units} it. Constants count as content."]
    for sentence in (*sentences, *measured.notes):
        console.print(Text(sentence, style=DIM))


def _first_names(names: Sequence[str]) -> str:
    more = ", …" if len(names) > 8 else ""
    return f": {', '.join(names[:8])}{more}." if names else "."


def _layers(rows: Sequence[LayerRow]) -> Table:
    """A table with a line per layer; in its last columns each head is one block character."""
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
        if moved:
            maxima = [(m.inside, m.past, m.ceiling) for h in row.heads if (m := h.moved)]
            cells += [f"{max(x):.1f}" for x in zip(*maxima, strict=True)] or [NOTHING] * 3
        cells += [f"{sum(h.away for h in row.heads) / len(row.heads):.0f}"]
        cells += [_blocks([h.position for h in row.heads]), _blocks([h.sink for h in row.heads])]
        grid.add_row(*cells)
    return grid


def _range(bands: Sequence[Band]) -> str:
    ends = [end for band in bands for end in (band.least, band.greatest)]
    return f"{min(ends):.1f} … {max(ends):.1f}" if ends else NOTHING


def _blocks(shares: Sequence[float]) -> str:
    """One block character per head for its share, 0 to 1; any share above 2 % is visible."""
    return "".join(BLOCKS[min(8, max(int(s > 0.02), round(s * 8)))] for s in shares)


def score_plots(measured: ScoreStatistics) -> list[Plot]:
    """Plot the mean score by distance, and the share of attention up to each distance, for the
    first, the middle and the last layer."""
    rows, trained, means, shares = measured.layers, measured.trained, [], []
    chosen = dict.fromkeys((0, len(rows) // 2, len(rows) - 1))
    for row, style in zip((rows[n] for n in chosen), STROKES, strict=False):
        bins = [*zip(*(h.bins for h in row.heads), strict=True)]  # for each bin, that of every head
        starts = [heads[0].distance for heads in bins]
        ends = [*(start - 1 for start in starts[1:]), measured.length - 1]
        mean = [fmean(b.scores.mean for b in heads) for heads in bins]
        mass = accumulate(fmean(b.scores.mass for b in heads) for heads in bins)
        means.append(Line(f"layer {row.layer}", [*zip(starts, mean, strict=True)], *style))
        shares.append(Line(f"layer {row.layer}", [*zip(ends, mass, strict=True)], *style))
    mark = ("trained", float(trained)) if trained and trained < measured.length else None
    axes = "cumulative share, by distance (log)"
    return [
        Plot("Mean score", "by distance (log)", means, x_log=True, mark=mark),
        Plot("Attention", axes, shares, x_log=True, mark=mark, y_ends=(0.0, 1.0)),
    ]
