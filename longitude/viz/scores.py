"""What was measured of a checkpoint's attention, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.inspection.rows import SINK, USES, Band, HeadRow, LayerRow, QKTerms, ScoreStatistics
from longitude.viz.plot import DASHED, DIM, SOLID, SPARSE, Line, Pattern, Plot, Point
from longitude.viz.terminal import GAP, side_by_side

BLOCKS = "·▁▂▃▄▅▆▇█"
LOOKS: tuple[tuple[str, Pattern], ...] = (("cyan", SOLID), ("yellow", DASHED), ("magenta", SPARSE))
NOTHING = "–"


def show(measured: ScoreStatistics, console: Console) -> None:
    """Print the layers' table, curves by distance, and the four terms where there are some."""
    window = f"; window {measured.trained:,}" if measured.trained else ""
    head = f"{measured.queries} queries of {measured.length:,} tokens of {measured.text}{window}"
    console.print(Text("Attention scores", style="bold"))
    console.print(Text(head, style=DIM))
    console.print(layers(measured.layers))
    console.print(Text(legend(measured.layers), style=DIM))
    for row in side_by_side([by_distance(measured), attended(measured)], console.width):
        console.print()
        console.print(row)
    if measured.terms:
        console.print()
        console.print(Text(f"The four terms of layer {measured.terms.layer}'s scores", "bold"))
        console.print(terms(measured.terms))
    for sentence in (*sentences(measured), *measured.notes):
        console.print(Text(sentence, style=DIM))


def legend(rows: Sequence[LayerRow]) -> str:
    """What the columns are."""
    moved = any(h.moved for row in rows for h in row.heads)
    said = ["scores: least … greatest"]
    said += ["moved: the text's own queries and keys at distances inside and past"] if moved else []
    said += ["bound: what no distance can exceed"] if moved else []
    return "; ".join(
        [
            *said,
            "away: mean distance of attention",
            "position: share of the variance of scores that distance explains, a block a head",
            "sink: attention on the first token, a block a head",
        ]
    )


def layers(rows: Sequence[LayerRow]) -> Table:
    """A line for each layer, a block for each of its heads."""
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    past = any(h.past for row in rows for h in row.heads)
    moved = any(h.moved for row in rows for h in row.heads)
    heads = ["layer", "scores\ninside", *(["scores\npast"] if past else [])]
    heads += ["moved\ninside", "moved\npast", "bound"] if moved else []
    for head in [*heads, "away"]:
        made.add_column(head, justify="right", no_wrap=True)
    for head in ("position", "sink"):
        made.add_column(head, overflow="fold", min_width=8)  # many heads take several lines
    for row in rows:
        cells = [str(row.layer), _range([h.inside for h in row.heads])]
        cells += [_range([h.past for h in row.heads if h.past])] if past else []
        cells += _moved(row.heads) if moved else []
        away = sum(h.away for h in row.heads) / len(row.heads)
        made.add_row(
            *cells, f"{away:.0f}", _blocks([h.position for h in row.heads]),
            _blocks([h.sink for h in row.heads]),
        )  # fmt: skip
    return made


def terms(found: QKTerms) -> Table:
    """Each head's terms, as softmax feels them: each query's mean is taken off."""
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    made.add_column("head", justify="right")
    for term in (*found.heads[0].terms, found.heads[0].whole):
        made.add_column(term.name.replace("–", "–\n"), justify="right", no_wrap=True)
    for head in found.heads:
        cells = [f"{t.felt:.2f}" for t in (*head.terms, head.whole)]
        made.add_row(str(head.head), *cells)
    return made


def sentences(measured: ScoreStatistics) -> list[str]:
    """Which heads use position, and which are sinks."""
    every = [(row.layer, h) for row in measured.layers for h in row.heads]
    uses = [(layer, h.head) for layer, h in every if h.uses_position]
    sinks = [(layer, h.head) for layer, h in every if h.is_sink]
    said = [
        f"{len(uses)} of {len(every)} heads use position (distance explains {USES:.0%} or more)"
        f"{_some(uses)}.",
        f"{len(sinks)} leave {SINK:.0%} or more of their attention on the first token"
        f"{_some(sinks)}.",
    ]
    if measured.terms:
        said.append(
            "Terms are in scores, each query's mean taken off: what softmax can see. "
            "Constants count as content."
        )
    return said


def by_distance(measured: ScoreStatistics) -> Plot:
    """The mean score by distance, of the first, the middle and the last layer."""
    lines = []
    for row, look in zip(_chosen(measured.layers), LOOKS, strict=False):
        points: list[Point] = [
            (one.distance, sum(h.bins[n].scores.mean for h in row.heads) / len(row.heads))
            for n, one in enumerate(row.heads[0].bins)
        ]
        lines.append(Line(f"layer {row.layer}", points, *look))
    return _plot(measured, "Mean score", "by tokens away (log)", lines)


def attended(measured: ScoreStatistics) -> Plot:
    """The share of attention at most so far away."""
    rows = _chosen(measured.layers)
    lines = []
    for row, look in zip(rows, LOOKS, strict=False):
        bins = row.heads[0].bins
        ends = [*(b.distance - 1 for b in bins[1:]), measured.length - 1]
        total, points = 0.0, []
        for n, end in enumerate(ends):
            total += sum(h.bins[n].scores.mass for h in row.heads) / len(row.heads)
            points.append((end, total))
        lines.append(Line(f"layer {row.layer}", points, *look))
    return _plot(measured, "Attention", "share up to so many tokens away (log)", lines, (0.0, 1.0))


def _plot(
    measured: ScoreStatistics, title: str, axes: str, lines: list[Line], ends: Sequence[float] = ()
) -> Plot:
    trained = measured.trained
    mark = ("trained", float(trained)) if trained and trained < measured.length else None
    return Plot(title, axes, lines, x_ratios=True, mark=mark, y_ends=ends)


def _chosen(rows: Sequence[LayerRow]) -> list[LayerRow]:
    return [rows[n] for n in dict.fromkeys((0, len(rows) // 2, len(rows) - 1))]


def _moved(heads: Sequence[HeadRow]) -> list[str]:
    found = [h.moved for h in heads if h.moved]
    if not found:
        return [NOTHING] * 3
    return [
        f"{max(x):.1f}" for x in zip(*((m.inside, m.past, m.ceiling) for m in found), strict=True)
    ]


def _range(bands: Sequence[Band]) -> str:
    if not bands:
        return NOTHING
    return f"{min(b.least for b in bands):.1f} … {max(b.greatest for b in bands):.1f}"


def _blocks(shares: Sequence[float]) -> str:
    """A block for each share, 0 to 1; what is more than nothing shows."""
    return "".join(BLOCKS[min(8, max(int(s > 0.02), round(s * 8)))] for s in shares)


def _some(heads: list[tuple[int, int]], most: int = 8) -> str:
    if not heads:
        return ""
    named = ", ".join(f"{layer}.{head}" for layer, head in heads[:most])
    return f": {named}{', …' if len(heads) > most else ''}"
