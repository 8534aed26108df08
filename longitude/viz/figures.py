"""A scheme's page as charts, two in a row and one row under another, written in Vega-Lite.

Rows are put aside by name and joined to the charts last: altair copies a chart at every step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import altair as alt

from longitude.inspection.rows import Grid, Page, Sheet, plain
from longitude.viz.text import gaps, spans

# Okabe and Ito's colours, which the colour-blind can tell apart
BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
GREY, PALE, INK = "#8a8a8a", "#e4e4e4", "#222222"
WIDTH, HEIGHT = 360, 240
CELL = 6  # whole pixels for each token of a picture of pairs, so that no seams show
SHORT = (  # 0, 500, 20k, 3M
    "abs(datum.value) >= 1e6 ? format(datum.value / 1e6, '.3~g') + 'M' : "
    "abs(datum.value) >= 1e4 ? format(datum.value / 1e3, '.3~g') + 'k' : "
    "format(datum.value, '.4~g')"
)
STATES = {
    "kept": BLUE,
    "mixed": ORANGE,
    "interpolated": VERMILION,
    "shortened": PURPLE,
    "still": GREY,
}
LOOK = {
    "font": "system-ui, sans-serif",
    "background": "white",
    "padding": 24,
    "axis": {
        "gridColor": "#eee",
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
    },
    "title": {"color": INK, "subtitleColor": "#555", "anchor": "start", "frame": "group"},
    "view": {"stroke": None},
}
Put = Callable[[Any], alt.NamedData]


def page_spec(page: Page) -> dict[str, Any]:
    """Every sheet of a page, one under the other, as a Vega-Lite document."""

    def body(put: Put) -> dict[str, Any]:
        charts = [sheet_chart(sheet, page, put) for sheet in page.sheets]
        whole = alt.vconcat(*charts, spacing=36).properties(title=_title(page))
        return inner(whole.resolve_scale(color="independent"))

    return document(body)


def document(body: Callable[[Put], dict[str, Any]]) -> dict[str, Any]:
    """A Vega-Lite document in the house's look; rows that its body puts aside come last."""
    datasets: dict[str, list[dict[str, Any]]] = {}

    def put(rows: Any) -> alt.NamedData:
        name = f"rows-{len(datasets)}"
        datasets[name] = plain(tuple(rows))
        return alt.NamedData(name)

    return {"$schema": alt.SCHEMA_URL, "config": LOOK, **body(put), "datasets": datasets}


def inner(chart: Any) -> dict[str, Any]:
    """A chart as a part of a document, without what a whole one has."""
    spec = chart.to_dict(validate=False)
    return {name: spec[name] for name in spec if name not in ("$schema", "config")}


def sheet_chart(sheet: Sheet, page: Page, put: Put) -> alt.VConcatChart:
    """The pictures of one scheme, two in a row, under its parts."""
    makers = {
        distance_map: sheet.distances,
        decay_curve: sheet.decay,
        wavelength_plot: sheet.wavelengths,
        scale_curve: sheet.scale,
        bias_curves: sheet.bias,
        visible_pairs: sheet.visible.tokens,
    }
    drawn = [make(sheet, page, put) for make, rows in makers.items() if rows]
    rows = [_beside(drawn[n : n + 2]) for n in range(0, len(drawn), 2)]
    head = f"Layer {spans(sheet.layers)}" if sheet.layers else "Parts"
    lines = [f"{p.site}: {p.written} · {p.paper}" for p in sheet.parts] + list(sheet.notes)
    title = alt.TitleParams(head, subtitle=lines, fontSize=14, subtitleFontSize=11, offset=14)
    return alt.vconcat(*rows, spacing=28).resolve_scale(color="independent").properties(title=title)


def distance_map(sheet: Sheet, page: Page, put: Put) -> alt.LayerChart:
    """Believed against true distance; the grey line is the truth, grey bands are hidden."""
    points = [(r.distance, r.believed) for r in sheet.distances]
    most = max((y for _, y in points if y is not None), default=0)
    x = _x("distance", "true distance (tokens)", page.length - 1)
    y = alt.Y("believed:Q", title="believed distance (tokens)", axis=alt.Axis(labelExpr=SHORT))
    same = put({"distance": d, "believed": d} for d in (0, min(most, page.length - 1)))
    layers = [
        *_hidden(points, x, put),
        alt.Chart(same).mark_line(color=GREY, strokeDash=[2, 3]).encode(x, y),
        *_level("trained", page.trained, "believed", 2 * most, put),
        _line(put(sheet.distances), BLUE).encode(x, y),
    ]
    return _chart("Distance map (dotted: the true distance)", layers)


def decay_curve(sheet: Sheet, page: Page, put: Put) -> alt.LayerChart:
    """The mean cosine over pairs by distance, its swing as a band, plain RoPE's in grey."""
    rows = put(sheet.decay)
    x = _x("distance", "distance (tokens)", page.length - 1, ratios=True)
    usual = alt.Chart(rows).mark_line(color=GREY, strokeDash=[2, 3])
    ends = alt.Chart(rows).mark_area(color=BLUE, opacity=0.18)
    layers = [
        *_hidden([(r.distance, r.mean) for r in sheet.decay], x, put),
        usual.encode(x, alt.Y("plain:Q")),
        ends.encode(x, alt.Y("low:Q"), alt.Y2("high:Q")),
        _line(rows, BLUE).encode(x, alt.Y("mean:Q", title="mean cosine over pairs")),
    ]
    return _chart("Decay (dotted: plain RoPE; band: swing)", layers)


def wavelength_plot(sheet: Sheet, page: Page, put: Put) -> alt.LayerChart:
    """Each pair's wavelength, from plain to scaled, coloured by what became of it."""
    rows, longest = put(sheet.wavelengths), max(w.scaled or w.plain for w in sheet.wavelengths)
    x = _x("pair", "rotary pair", max(len(sheet.wavelengths) - 1, 1))
    scale = alt.Scale(type="log")
    before = alt.Y("plain:Q", scale=scale)
    after = alt.Y("scaled:Q", title="wavelength (tokens)", scale=scale, axis=_tens())
    used = [s for s in STATES if s in {w.state for w in sheet.wavelengths}]
    colour = alt.Color(
        "state:N",
        scale=alt.Scale(domain=used, range=[STATES[s] for s in used]),
        legend=_legend("bottom-right"),
    )
    tips = ["pair:Q", "plain:Q", "scaled:Q", "state:N"]
    layers = [
        alt.Chart(rows).mark_circle(color=GREY, size=14).encode(x, before),
        alt.Chart(rows).mark_rule(opacity=0.5).encode(x, before, alt.Y2("scaled:Q"), colour),
        alt.Chart(rows).mark_circle(size=34, opacity=1).encode(x, after, colour, tooltip=tips),
        *_level("trained", page.trained, "scaled", longest, put),
        *_level("length", page.length, "scaled", longest, put),
    ]
    return _chart("Wavelengths (small dots: plain RoPE)", layers)


def scale_curve(sheet: Sheet, page: Page, put: Put) -> alt.LayerChart:
    """The factor on a query's logits by position."""
    x = _x("position", "query position (tokens)", page.length - 1)
    y = alt.Y("factor:Q", title="factor on logits", scale=alt.Scale(zero=False))
    tips = ["position:Q", "seen:Q", "factor:Q"]
    return _chart("Query scale", [_line(put(sheet.scale), BLUE).encode(x, y, tooltip=tips)])


def bias_curves(sheet: Sheet, page: Page, put: Put) -> alt.LayerChart:
    """What a few heads add to their scores by distance."""
    away = [r.distance for r in sheet.bias]
    x = _x("distance", "distance (tokens)", max(away), ratios=True, low=min(away))
    y = alt.Y("bias:Q", title="added to scores", **_signed(r.bias for r in sheet.bias))
    heads = sorted({r.head for r in sheet.bias})
    colours = [BLUE, VERMILION, GREEN, PURPLE][: len(heads)]
    colour = alt.Color(
        "head:N",
        scale=alt.Scale(domain=heads, range=colours),
        legend=_legend("bottom", "head"),
    )
    first = [(r.distance, r.bias) for r in sheet.bias if r.head == heads[0]]
    tips = ["head:N", "distance:Q", "bias:Q"]
    line = _line(put(sheet.bias)).encode(x, y, colour, tooltip=tips)
    return _chart("Bias", [*_hidden(first, x, put), line])


def visible_pairs(sheet: Sheet, page: Page, put: Put) -> alt.LayerChart:
    """Which pairs are seen, coloured by how far apart they are believed; hidden ones are grey."""
    order = list(sheet.visible.tokens)
    ticks = [order[round(s * (len(order) - 1) / 4)] for s in range(5)]
    axis = alt.Axis(values=ticks, labelAngle=0, labelExpr=SHORT, labelOverlap=True)
    x = alt.X("key:O", title="key (token)", sort=order, axis=axis)
    y = alt.Y("query:O", title="query (token)", sort=order, axis=axis)
    legend = alt.Legend(title=["believed", "distance"], labelExpr=SHORT, gradientLength=120)
    shade = alt.Color("believed:Q", scale=alt.Scale(scheme="viridis", reverse=True), legend=legend)
    pairs = _pairs(sheet.visible)
    seen = put(p for p in pairs if p["believed"] is not None)
    hidden = put(p for p in pairs if p["believed"] is None)
    tips = ["query:O", "key:O", "believed:Q"]
    layers = [
        alt.Chart(seen).mark_rect().encode(x, y, shade, tooltip=tips),
        alt.Chart(hidden).mark_rect(color=PALE).encode(x, y),
    ]
    side = max(1, HEIGHT // (CELL * len(order))) * CELL * len(order)
    return _chart("Visible pairs (grey: hidden)", layers).properties(width=side, height=side)


def _pairs(grid: Grid) -> list[dict[str, Any]]:
    return [
        {"query": i, "key": j, "believed": told if told is None else abs(told)}
        for i, line in zip(grid.tokens, grid.believed, strict=True)
        for j, told in zip(grid.tokens, line, strict=True)
    ]


def _line(data: alt.NamedData, colour: str | None = None) -> alt.Chart:
    """A curve; round ends make a dot of a point that stands alone between hidden ones."""
    mark: dict[str, Any] = {} if colour is None else {"color": colour}
    return alt.Chart(data).mark_line(strokeWidth=2.2, strokeCap="round", **mark)


def _tens() -> alt.Axis:
    """Numbers at the powers of ten, on both sides of 0."""
    tens = [10**n for n in range(10)]
    return alt.Axis(values=[*(-t for t in reversed(tens)), 0, *tens], labelExpr=SHORT)


def _signed(values: Iterable[float | None]) -> dict[str, Any]:
    """Even where all is small, in equal ratios where large numbers would flatten the others."""
    most = max((abs(v) for v in values if v is not None), default=0)
    return {"scale": alt.Scale(type="symlog"), "axis": _tens()} if most > 10 else {}


def _legend(orient: Any, title: str | None = None) -> alt.Legend:
    way = "horizontal" if orient == "bottom" else "vertical"
    return alt.Legend(title=title, orient=orient, direction=way, symbolOpacity=1, offset=6)


def _x(name: str, title: str, high: float, ratios: bool = False, low: float = 0) -> alt.X:
    scale = alt.Scale(type="symlog" if ratios else "linear", domain=[low, high], nice=False)
    axis = _tens() if ratios else alt.Axis(labelExpr=SHORT)
    return alt.X(f"{name}:Q", title=title, scale=scale, axis=axis)


def _hidden(points: list[tuple[int, float | None]], x: alt.X, put: Put) -> list[Any]:
    """Grey bands where pairs are hidden."""
    bands = [{"distance": a, "end": b} for a, b in gaps(points)]
    return [alt.Chart(put(bands)).mark_rect(color=PALE).encode(x, x2="end:Q")] if bands else []


def _level(name: str, at: int | None, field: str, high: float, put: Put) -> list[Any]:
    """A named level, where it lies in the picture."""
    if not at or at > high:
        return []
    y, colour = alt.Y(f"{field}:Q"), GREEN if name == "trained" else INK
    data = put([{field: at, "name": f"{name} {at:,}"}])
    text = alt.Chart(data).mark_text(align="left", dx=5, dy=-7, color=INK, fontSize=10)
    return [
        alt.Chart(data).mark_rule(color=colour, strokeDash=[6, 4]).encode(y),
        text.encode(y, text="name:N", x=alt.value(0)),
    ]


def _chart(title: str, layers: list[Any]) -> Any:
    return alt.layer(*layers).properties(title=title, width=WIDTH, height=HEIGHT)


def _beside(charts: list[Any]) -> alt.HConcatChart:
    return alt.hconcat(*charts, spacing=40).resolve_scale(color="independent")


def _title(page: Page) -> alt.TitleParams:
    sizes = f"{page.length:,} tokens, {page.heads} heads of {page.dim} dimensions"
    trained = f"; trained at {page.trained:,}" if page.trained else ""
    look: dict[str, Any] = {
        "font": "monospace",
        "fontSize": 16,
        "subtitleFontSize": 12,
        "offset": 18,
    }
    return alt.TitleParams(textwrap.wrap(page.written, 84), subtitle=[sizes + trained], **look)
