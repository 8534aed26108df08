"""The charts of a scheme: what it does with distances, wavelengths, scores and visibility.

`longitude explore` draws them for schemes side by side and feeds them rows as controls move;
`longitude show` draws them once for one scheme, with its own rows. The trained window and the
length are the parameters `window` and `length`; what lies past the window is orange.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longitude.inspection.rows import Grid, Page, Sheet
from longitude.viz import vega as v
from longitude.viz.text import gaps, spans
from longitude.viz.vega import Spec

NAMES = "ABC"  # names of the schemes side by side
CELLS = 40  # tokens on each side of the chart of pairs
TOKEN_STATES = ("dropped", "hidden", "known", "past")  # in the order of the theme's colours
PAIR_STATES = ("kept", "mixed", "interpolated", "shortened", "still")
TWO_SCALES: Spec = {"resolve": {"scale": {"color": "independent"}}}  # in and past the window
LINE = v.mark("line", clip=True)
THIN = {**LINE, "strokeWidth": 1.4}
COLOUR = v.channel("column:N", scale={"domain": [*NAMES], "range": "category"}, legend=None)
PAST_WINDOW = "length > window"


def explorer_specs() -> dict[str, Spec]:
    """Every chart of the explorer by name; the page supplies the rows."""
    sizes: Spec = {"params": [{"name": n, "value": 4096} for n in ("window", "length")]}
    return {
        "map": v.document(distance_map(), **sizes),
        "decay": v.document(decay(), **sizes),
        "wavelengths": v.document(wavelengths(), **sizes),
        "stretch": v.document(stretch(), **sizes),
        "scale": v.document(scale(), **sizes),
        "keys": v.document(keys(), height=150, **sizes),
        "bias": v.document(bias(), height=210, **sizes),
        "pairs": v.document(pairs(), **sizes, **TWO_SCALES),
    }


def distance_map(truth: str = "length - 1", window: str = PAST_WINDOW) -> list[Spec]:
    """Effective against true distance; the true one is dotted up to the expression `truth`, the
    trained window dashed if the expression `window` holds."""
    x, y = _x("distance", "true distance (tokens)"), _y("high", "effective distance (tokens)")
    ends: Spec = {"x": {**x, "field": "zero"}, "y": {**y, "field": "zero"}}
    ends |= {"x2": {"field": "end"}, "y2": {"field": "end"}}
    dotted = v.mark("rule", strokeDash=[2, 4], style="faint")
    low = v.layer({**LINE, "strokeWidth": 1}, x=x, y={**y, "field": "low"}, color=COLOUR)
    return [
        _past(x),
        _computed(dotted, {"zero": "0", "end": truth}, "true", **ends),
        *_window_rule(window),
        low,
        *_curve(x, y, "low:Q", "high:Q", band=0.25),
    ]


def decay() -> list[Spec]:
    """The mean cosine over pairs by distance, its range as a band."""
    x, y = _x("distance", "distance (tokens)", "symlog"), _y("mean", "mean cosine over pairs")
    return [_past(x), *_curve(x, y, "mean:Q", "low:Q", "high:Q", band=0.16)]


def wavelengths(states: Sequence[str] = ()) -> list[Spec]:
    """Each pair's wavelength, by scheme; with `states`, by its state, beside unscaled RoPE's."""
    x, y = _x("pair", "rotary pair", top=None), _y("scaled", "wavelength (tokens)", "log")
    above: Spec = {"y": {**y, "field": "from"}, "y2": {"value": 0}}
    slow = _computed(v.mark("rect", style="past", clip=True), {"from": "window"}, **above)
    tips = v.tooltip("label:N", "pair:Q", "scaled:Q", "plain:Q", "stretch:Q", "state:N")
    if not states:
        line = v.layer(THIN, x=x, y=y, color=COLOUR)
        dots = v.layer(v.mark("circle", size=26), x=x, y=y, color=COLOUR, tooltip=tips)
        return [slow, *_window_rule(), line, dots]
    look: Spec = {"title": None, "orient": "bottom-right", "symbolType": "circle"}
    colour = v.channel("state:N", scale={"domain": [*states], "range": "ordinal"}, legend=look)
    before = {**y, "field": "plain"}
    moved = v.mark("rule", strokeDash=[1, 0], opacity=0.5)
    return [
        slow,
        *_window_rule(),
        v.layer(v.mark("circle", size=14, style="faint"), x=x, y=before),
        v.layer(moved, x=x, y=before, y2={"field": "scaled"}, color=colour),
        v.layer(v.mark("circle", size=34), x=x, y=y, color=colour, tooltip=tips),
    ]


def stretch() -> list[Spec]:
    """How many times longer each pair's wavelength is than the model's own."""
    x, y = _x("pair", "rotary pair", top=None), _y("stretch", "× the model’s own", "log2")
    y_axis = {**y, "scale": {**y["scale"], "domain": {"unionWith": [1, 2]}}}
    tips = v.tooltip("label:N", "pair:Q", "stretch:Q", "state:N")
    dots = v.layer(v.mark("circle", size=26), x=x, y=y, color=COLOUR, tooltip=tips)
    return [v.layer(THIN, x=x, y=y_axis, color=COLOUR), dots]


def scale() -> list[Spec]:
    """The factor on a query's logits by position."""
    x, y = _x("position", "query position (tokens)"), _y("factor", "factor on logits")
    y["scale"] = {"zero": False}
    return [_past(x), *_curve(x, y, "factor:Q", "seen:Q")]


def keys() -> list[Spec]:
    """The state of each token for the last query: a bar per scheme, split where states change."""
    colours = {"domain": [*TOKEN_STATES], "range": "diverging"}
    bar = v.layer(
        v.mark("bar", height={"band": 0.62}),
        x=_x("first", "token (the last one is the query)"),
        x2={"field": "end"},
        y=v.channel("label:N", title=None, axis={"ticks": False}),
        color=v.channel("state:N", scale=colours, legend=None),
        tooltip=v.tooltip("label:N", "first:Q", "last:Q", "state:N"),
    )
    return [bar]


def bias() -> list[Spec]:
    """What some heads of one scheme add to their scores, by distance."""
    legend: Spec = {"orient": "bottom", "title": "head", "symbolType": "stroke"}
    line = v.layer(
        "line",
        x=_x("distance", "distance (tokens)", "symlog", top=None),
        y=_y("bias", "added to scores", "symlog"),
        color=v.channel("head:O", scale={"range": "ordinal"}, legend=legend),
        tooltip=v.tooltip("head:N", "distance:Q", "bias:Q"),
    )
    return [line]


def pairs(near: str = "window", legend: Spec | None = None) -> list[Spec]:
    """Which pairs are visible, shaded by distance up to the expression `near`; hidden pairs are
    pale, those past the trained distances have another colour."""
    shown = v.SHORT.replace("datum.value", f"(datum.value / {CELLS} * length)")
    look: Spec = {"values": [0, 10, 20, 30, 40], "labelExpr": shown, "grid": False}
    even: Spec = {"domain": [0, CELLS]}
    place: Spec = {
        "x": v.axis("key", "key", ends=even, **look),
        "x2": {"field": "key_end"},
        "y": v.axis("query", "query", ends={**even, "reverse": True}, **look),
        "y2": {"field": "query_end"},
        "tooltip": v.tooltip("query_token:Q", "key_token:Q", "believed:Q", believed="distance"),
    }

    def shade(colours: str, low: str, high: str, legend: Spec | None) -> Spec:
        ends = {"domain": [{"expr": low}, {"expr": high}], "clamp": True, "nice": False}
        scale = {"range": colours, "interpolate": "rgb", **ends}
        return v.channel("believed:Q", scale=scale, legend=legend)

    cell, inside = v.mark("rect", strokeWidth=0), shade("heatmap", "0", near, legend)
    past = shade("ramp", "window", "length", None)
    return [
        v.layer({**cell, "style": "hidden"}, where="datum.believed === null", **place),
        v.layer(cell, where="datum.believed !== null && !datum.past", **place, color=inside),
        v.layer(cell, where="datum.past", **place, color=past),
    ]


def page_spec(page: Page) -> Spec:
    """The charts of `longitude show`: those of each distinct layer under the list of its parts."""
    sizes = f"{page.length:,} tokens, {page.heads} heads of {page.dim} dimensions"
    trained = f"; trained at {page.trained:,}" if page.trained else ""
    text = {"text": textwrap.wrap(page.written, 84), "subtitle": [sizes + trained]}
    window = {"name": "window", "value": page.trained or page.length}
    sheets = []
    for sheet in page.sheets:
        head = f"Layer {spans(sheet.layers)}" if sheet.layers else "Parts"
        lines = [f"{p.site}: {p.written} · {p.paper}" for p in sheet.parts] + [*sheet.notes]
        title = {"text": head, "subtitle": lines, "fontSize": 14, "offset": 14}
        drawn = {"concat": [*_sheet_charts(sheet, page)], "columns": 2, "spacing": 36}
        sheets.append({"title": title, **drawn, **TWO_SCALES})
    return {
        "title": {**text, "font": "monospace", "fontSize": 16, "offset": 18},
        "params": [v.CHOSEN, window, {"name": "length", "value": page.length}],
        "vconcat": sheets,
        "spacing": 36,
    }


def _sheet_charts(sheet: Sheet, page: Page) -> Iterator[Spec]:
    """The charts for which one scheme has rows, as parts of a larger document."""
    distances = [
        {"distance": r.distance, "low": r.believed, "high": r.believed} for r in sheet.distances
    ]
    largest = max((r["high"] for r in distances if r["high"] is not None), default=0)
    near = distance_map(f"min({largest}, length - 1)", f"{PAST_WINDOW} && window < {2 * largest}")
    dotted = v.mark("line", strokeDash=[2, 3], strokeWidth=1.4, style="faint")
    x = _x("distance", "distance (tokens)", "symlog")
    unscaled = v.layer(dotted, x=x, y="plain:Q")
    states = [s for s in PAIR_STATES if s in {w.state for w in sheet.wavelengths}]
    longest = max((w.scaled or w.plain for w in sheet.wavelengths), default=0)
    level = v.level(f"length {page.length:,}", page.length, [0, longest])
    waves = [*wavelengths(states), *level]
    cells = _pair_rows(sheet.visible, page)
    deepest = max((c["believed"] or 0 for c in cells if not c["past"]), default=1)
    legend: Spec = {"title": "distance", "labelExpr": v.SHORT, "gradientLength": 120}
    charts: list[tuple[str, str, list[Spec], Sequence[Any]]] = [  # title, y, layers, rows
        ("Distance map (dotted: the true distance)", "high", near, distances),
        ("Decay (dotted: unscaled RoPE; band: range)", "mean", [unscaled, *decay()], sheet.decay),
        ("Wavelengths (small dots: unscaled RoPE)", "", waves, sheet.wavelengths),
        ("Query scale", "", scale(), sheet.scale),
        ("Bias", "bias", bias(), sheet.bias),
        ("Visible pairs (pale: hidden)", "", pairs(str(deepest), legend), cells),
    ]
    for title, y, layers, data in charts:
        rows = [row if isinstance(row, dict) else row._asdict() for row in data]
        if not rows:
            continue
        one_head = [r for r in rows if r.get("head") == rows[0].get("head")] if y else []
        hidden = gaps([(r["distance"], r[y]) for r in one_head])
        bands = [{"distance": a, "end": b} for a, b in hidden]
        across = layers[-1]["encoding"]["x"]
        pale = v.layer(v.mark("rect", style="hidden"), bands, x=across, x2={"field": "end"})
        drawn = {"layer": [*([pale] if bands else []), *layers], "height": 240, "title": title}
        named = [{**r, "column": "A", "label": sheet.written} for r in rows]
        size = {"width": 240, **TWO_SCALES} if data is cells else {"width": 360}
        yield v.inset(drawn, named, **size)


def _pair_rows(grid: Grid, page: Page) -> list[dict[str, Any]]:
    """A cell for each pair of tokens, slightly wider than its place so that no seams show."""
    cell = CELLS / max(1, len(grid.tokens))
    return [
        {
            **{"query": n * cell, "query_end": (n + 1) * cell + 0.05, "query_token": i},
            **{"key": m * cell, "key_end": (m + 1) * cell + 0.05, "key_token": j},
            "believed": None if distance is None else abs(distance),
            "past": abs(distance or 0) > (page.trained or page.length),
        }
        for n, (i, line) in enumerate(zip(grid.tokens, grid.believed, strict=True))
        for m, (j, distance) in enumerate(zip(grid.tokens, line, strict=True))
    ]


def _x(field: str, title: str, scale: str = "linear", top: str | None = "length - 1") -> Spec:
    ends: Spec = {} if top is None else {"domainMin": 0, "domainMax": {"expr": top}}
    return v.axis(field, title, scale, ends=ends, grid=False)


def _y(field: str, title: str, scale: str = "linear") -> Spec:
    return v.axis(field, title, scale, ends={"nice": True} if scale == "linear" else None)


def _curve(x: Spec, y: Spec, *tips: str, band: float = 0) -> list[Spec]:
    """A line for each scheme, its range as a band of opacity `band`, and invisible points with the
    tooltips."""
    area: Spec = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": COLOUR}
    dots = v.mark("circle", size=90, opacity=0)
    shown = v.tooltip("label:N", f"{x['field']}:Q", *tips)
    return [
        *([v.layer(v.mark("area", opacity=band), **area)] if band else []),
        v.layer(LINE, x=x, y=y, color=COLOUR),
        v.layer(dots, x=x, y=f"{y['field']}:Q", tooltip=shown),
    ]


def _computed(
    drawn: Spec, fields: Mapping[str, str], where: str = PAST_WINDOW, **encoding: Any
) -> Spec:
    """A layer of one row, whose fields are computed from the chart's parameters."""
    steps = [{"filter": where}, *({"calculate": e, "as": n} for n, e in fields.items())]
    return v.layer(drawn, [{}], **encoding) | {"transform": steps}


def _past(x: Spec) -> Spec:
    """Shade the part of a chart that lies past the trained window."""
    ends: Spec = {"x": {**x, "field": "from"}, "x2": {"field": "to"}}
    fields = {"from": "window", "to": "length - 1"}
    return _computed(v.mark("rect", style="past", clip=True), fields, **ends)


def _window_rule(where: str = PAST_WINDOW) -> list[Spec]:
    """A dashed rule at the trained window, with its number."""
    fields = {"at": "window", "name": "'trained window ' + format(window, ',')"}
    text = v.mark("text", align="left", baseline="bottom", dx=5, dy=-3, fontSize=10)
    place: Spec = {"y": "at:Q", "x": {"value": 0}, "text": "name:N"}
    return [
        _computed(v.mark("rule"), fields, where, y="at:Q"),
        _computed(text, fields, where, **place),
    ]
