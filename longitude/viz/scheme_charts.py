"""The charts of a scheme: what it does with distances, wavelengths, scores and visibility.

`longitude explore` draws them for schemes side by side and feeds them rows as controls move;
`longitude show` draws them once for one scheme, with its own rows. The trained window and the
length are the parameters `window` and `length`; what lies past the window is orange.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from longitude.inspection.rows import Grid, Page, Sheet
from longitude.viz import vega as v
from longitude.viz.text import gaps, spans
from longitude.viz.vega import Rows, Spec

NAMES = "ABC"  # of schemes side by side
CELLS = 40  # tokens on each side of the chart of pairs
TOKEN_STATES = ("dropped", "hidden", "known", "past")  # in the order of the theme's colours
PAIR_STATES = ("kept", "mixed", "interpolated", "shortened", "still")
HEIGHTS = {"keys": 150, "bias": 210}
SHADES: dict[str, Spec] = {
    "pairs": {"resolve": {"scale": {"color": "independent"}}}
}  # two scales of one channel
LINE = v.mark("line", clip=True)
COLOUR = v.channel("column:N", scale={"domain": [*NAMES], "range": "category"}, legend=None)


def explorer_specs() -> dict[str, Spec]:
    """Every chart of the explorer by its name, to be fed with rows."""
    layers = {
        "map": distance_map(),
        "decay": decay(),
        "wavelengths": wavelengths(),
        "stretch": stretch(),
        "scale": scale(),
        "keys": keys(),
        "bias": bias(),
        "pairs": pairs(),
    }
    sizes: Spec = {"params": [{"name": n, "value": 4096} for n in ("window", "length")]}
    return {
        name: v.document(drawn, height=HEIGHTS.get(name, 250), **sizes, **SHADES.get(name, {}))
        for name, drawn in layers.items()
    }


def distance_map(truth: str = "length - 1", window: str = "length > window") -> list[Spec]:
    """Effective against true distance; the true one dotted, as far as the expression `truth`, and
    the trained window dashed where `window` holds."""
    x, y = _x("distance", "true distance (tokens)"), _y("high", "effective distance (tokens)")
    dotted = v.mark("rule", strokeDash=[2, 4], style="faint")
    ends: Spec = {"x": _as(x, "zero"), "x2": {"field": "end"}}
    ends |= {"y": _as(y, "zero"), "y2": {"field": "end"}}
    return [
        _past(x),
        _computed(dotted, {"zero": "0", "end": truth}, **ends),
        *_window_rule(window),
        _band(x, y, 0.25),
        _of_schemes(LINE, x, y),
        _of_schemes({**LINE, "strokeWidth": 1}, x, _as(y, "low")),
        _pointed(x, "high", "low:Q", "high:Q"),
    ]


def decay() -> list[Spec]:
    """The mean cosine over pairs by distance, its range as a band."""
    x, y = _x("distance", "distance (tokens)", "symlog"), _y("mean", "mean cosine over pairs")
    values = ("mean:Q", "low:Q", "high:Q")
    return [_past(x), _band(x, y, 0.16), _of_schemes(LINE, x, y), _pointed(x, "mean", *values)]


def wavelengths(states: Sequence[str] = ()) -> list[Spec]:
    """Each pair's wavelength, by scheme, or beside unscaled RoPE's by what scaling did to it."""
    x, y = _x("pair", "rotary pair", top=None), _y("scaled", "wavelength (tokens)", "log")
    above = v.mark("rect", style="past", clip=True)
    slow = _computed(above, {"from": "window"}, "length > window", y=_as(y, "from"))
    slow["encoding"]["y2"] = {"value": 0}
    tips = v.tooltip("label:N", "pair:Q", "scaled:Q", "plain:Q", "stretch:Q", "state:N")
    dots: Spec = {"x": x, "y": y, "tooltip": tips}
    if not states:
        line = _of_schemes({**LINE, "strokeWidth": 1.4}, x, y)
        return [
            slow,
            *_window_rule(),
            line,
            v.layer(v.mark("circle", size=26), **dots, color=COLOUR),
        ]
    look: Spec = {"title": None, "orient": "bottom-right", "symbolType": "circle"}
    domain = {"domain": [*states], "range": "ordinal"}
    colour, before = v.channel("state:N", scale=domain, legend=look), _as(y, "plain")
    moved = v.mark("rule", strokeDash=[1, 0], opacity=0.5)
    return [
        slow,
        *_window_rule(),
        v.layer(v.mark("circle", size=14, style="faint"), x=x, y=before),
        v.layer(moved, x=x, y=before, y2={"field": "scaled"}, color=colour),
        v.layer(v.mark("circle", size=34), **dots, color=colour),
    ]


def stretch() -> list[Spec]:
    """How many times longer each pair's wavelength is than the model's own."""
    x, y = _x("pair", "rotary pair", top=None), _y("stretch", "× the model’s own", "log2")
    least = {**y, "scale": {**y["scale"], "domain": {"unionWith": [1, 2]}}}
    tips = v.tooltip("label:N", "pair:Q", "stretch:Q", "state:N")
    line = _of_schemes({**LINE, "strokeWidth": 1.4}, x, least)
    return [line, v.layer(v.mark("circle", size=26), x=x, y=y, color=COLOUR, tooltip=tips)]


def scale() -> list[Spec]:
    """The factor on a query's logits by position."""
    x, y = _x("position", "query position (tokens)"), _y("factor", "factor on logits")
    y["scale"] = {"zero": False}
    return [_past(x), _of_schemes(LINE, x, y), _pointed(x, "factor", "factor:Q", "seen:Q")]


def keys() -> list[Spec]:
    """What becomes of each token for the last one: a bar per scheme, cut where states change."""
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
    """Which pairs are visible, shaded by distance up to `near`; hidden ones pale, those past the
    trained distances in another colour."""
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

    inside: Spec = place | {"color": shade("heatmap", "0", near, legend)}
    far: Spec = place | {"color": shade("ramp", "window", "length", None)}
    cell = v.mark("rect", strokeWidth=0)
    return [
        v.layer({**cell, "style": "hidden"}, where="datum.believed === null", **place),
        v.layer(cell, where="datum.believed !== null && !datum.past", **inside),
        v.layer(cell, where="datum.past", **far),
    ]


def page_spec(page: Page) -> Spec:
    """The charts of `longitude show`: those of each distinct layer, two in a row."""
    sizes = f"{page.length:,} tokens, {page.heads} heads of {page.dim} dimensions"
    trained = f"; trained at {page.trained:,}" if page.trained else ""
    text = {"text": textwrap.wrap(page.written, 84), "subtitle": [sizes + trained]}
    window = {"name": "window", "value": page.trained or page.length}
    return {
        "title": {**text, "font": "monospace", "fontSize": 16, "offset": 18},
        "params": [v.CHOSEN, window, {"name": "length", "value": page.length}],
        "vconcat": [_sheet(sheet, page) for sheet in page.sheets],
        "spacing": 36,
    }


def sheet_charts(sheet: Sheet, page: Page) -> dict[str, Spec]:
    """The charts that one scheme has rows for, by name: parts of a larger document."""
    legend: Spec = {"title": "distance", "labelExpr": v.SHORT, "gradientLength": 120}
    effective = [(r.distance, r.believed) for r in sheet.distances]
    most = max((y for _, y in effective if y is not None), default=0)
    longest = max((w.scaled or w.plain for w in sheet.wavelengths), default=0)
    cells = _pair_rows(sheet.visible, page)
    deepest = max((c["believed"] or 0 for c in cells if not c["past"]), default=1)
    x = _x("distance", "distance (tokens)", "symlog")
    states = [s for s in PAIR_STATES if s in {w.state for w in sheet.wavelengths}]
    unscaled = v.mark("line", strokeDash=[2, 3], strokeWidth=1.4, style="faint")
    found: dict[str, tuple[str, list[Spec], Sequence[Any]]] = {
        "map": (
            "Distance map (dotted: the true distance)",
            [
                *_hidden(effective, _x("distance", "true distance (tokens)")),
                *distance_map(
                    f"min({most}, length - 1)", f"length > window && window < {2 * most}"
                ),
            ],
            [{"distance": d, "low": b, "high": b} for d, b in effective],
        ),
        "decay": (
            "Decay (dotted: unscaled RoPE; band: range)",
            [
                *_hidden([(r.distance, r.mean) for r in sheet.decay], x),
                v.layer(unscaled, x=x, y="plain:Q"),
                *decay(),
            ],
            sheet.decay,
        ),
        "wavelengths": (
            "Wavelengths (small dots: unscaled RoPE)",
            [*wavelengths(states), *v.level(f"length {page.length:,}", page.length, [0, longest])],
            sheet.wavelengths,
        ),
        "scale": ("Query scale", scale(), sheet.scale),
        "bias": (
            "Bias",
            [
                *_hidden(
                    [(r.distance, r.bias) for r in sheet.bias if r.head == sheet.bias[0].head],
                    _x("distance", "distance (tokens)", "symlog", top=None),
                ),
                *bias(),
            ],
            sheet.bias,
        ),
        "pairs": ("Visible pairs (pale: hidden)", pairs(str(deepest), legend), cells),
    }
    return {
        name: v.inset(
            {"layer": layers, "height": 240, "title": title},
            [_plain(r) | {"column": "A", "label": sheet.written} for r in rows],
            width=240 if name == "pairs" else 360,
            **SHADES.get(name, {}),
        )
        for name, (title, layers, rows) in found.items()
        if rows
    }


def _sheet(sheet: Sheet, page: Page) -> Spec:
    """The charts of one scheme under the list of its parts."""
    head = f"Layer {spans(sheet.layers)}" if sheet.layers else "Parts"
    lines = [f"{p.site}: {p.written} · {p.paper}" for p in sheet.parts] + [*sheet.notes]
    title = {"text": head, "subtitle": lines, "fontSize": 14, "offset": 14}
    drawn = [*sheet_charts(sheet, page).values()]
    alone = {"resolve": {"scale": {"color": "independent"}}}
    return {"title": title, "concat": drawn, "columns": 2, "spacing": 36, **alone}


def _pair_rows(grid: Grid, page: Page) -> Rows:
    """A cell for each pair of tokens, a hair wider than its place so that no seams show."""
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


def _plain(row: Any) -> dict[str, Any]:
    return dict(row) if isinstance(row, Mapping) else row._asdict()


def _hidden(points: Sequence[tuple[float, float | None]], x: Spec) -> list[Spec]:
    """Pale bands over the distances at which pairs are hidden."""
    bands = [{"distance": a, "end": b} for a, b in gaps(points)]
    band = v.mark("rect", style="hidden")
    return [v.layer(band, bands, x=x, x2={"field": "end"})] if bands else []


def _x(field: str, title: str, scale: str = "linear", top: str | None = "length - 1") -> Spec:
    ends: Spec = {} if top is None else {"domainMin": 0, "domainMax": {"expr": top}}
    return v.axis(field, title, scale, ends=ends, grid=False)


def _y(field: str, title: str, scale: str = "linear") -> Spec:
    return v.axis(field, title, scale, ends={"nice": True} if scale == "linear" else None)


def _as(given: Spec, field: str) -> Spec:
    return {**given, "field": field}


def _of_schemes(drawn: Spec, x: Spec, y: Spec) -> Spec:
    return v.layer(drawn, x=x, y=y, color=COLOUR)


def _band(x: Spec, y: Spec, opacity: float) -> Spec:
    area = v.mark("area", opacity=opacity)
    return v.layer(area, x=x, y=_as(y, "low"), y2={"field": "high"}, color=COLOUR)


def _pointed(x: Spec, y: str, *values: str) -> Spec:
    """Invisible points that answer a pointer."""
    tips = v.tooltip("label:N", f"{x['field']}:Q", *values)
    return v.layer(v.mark("circle", size=90, opacity=0), x=x, y=f"{y}:Q", tooltip=tips)


def _computed(drawn: Spec, fields: Mapping[str, str], where: str = "true", **encoding: Any) -> Spec:
    """A layer of one row, whose fields are expressions of the parameters."""
    steps = [{"filter": where}, *({"calculate": e, "as": n} for n, e in fields.items())]
    return v.layer(drawn, [{}], **encoding) | {"transform": steps}


def _past(x: Spec) -> Spec:
    """The part of a chart that lies past the trained window."""
    ends: Spec = {"x": _as(x, "from"), "x2": {"field": "to"}}
    fields = {"from": "window", "to": "length - 1"}
    return _computed(v.mark("rect", style="past", clip=True), fields, "length > window", **ends)


def _window_rule(where: str = "length > window") -> list[Spec]:
    """A dashed rule at the trained window, with its number."""
    fields = {"at": "window", "name": "'trained window ' + format(window, ',')"}
    text = v.mark("text", align="left", baseline="bottom", dx=5, dy=-3, fontSize=10)
    place: Spec = {"y": "at:Q", "x": {"value": 0}, "text": "name:N"}
    return [
        _computed(v.mark("rule"), fields, where, y="at:Q"),
        _computed(text, fields, where, **place),
    ]
