"""The pictures of the page, in Vega-Lite: drawn once, then fed with new rows as controls move.

Their rows go by one name, and what is not a row (the trained window, the length, the names of the
schemes) by parameters. A spec names no colour of the theme, so that one spec serves light and dark;
what lies past the trained window has a colour of its own, which no scheme has.
"""

from __future__ import annotations

from typing import Any

from longitude.explore.seen import STATES
from longitude.report.extending.look import DARK, LIGHT, config
from longitude.report.figures import SHORT

Spec = dict[str, Any]
ROWS = "rows"
NAMES = "ABC"  # of the schemes beside each other
HEIGHT = 250
CELLS = 40  # tokens on each side of the picture of pairs
SCHEMES = (1, 4, 3)  # of the colours that reports have: blue, pink and green
PASSED = 2  # orange
FAINT = {"light": "#d9d4cd", "dark": "#3b3836"}
HEADS = (1, 4, 3, 6)
TENS = [10**n for n in range(10)]
SCALES: dict[str, Spec] = {
    "even": {"type": "linear", "nice": False},
    "ratios": {"type": "symlog", "nice": False},
    "log": {"type": "log", "nice": False},
}


def charts() -> dict[str, Spec]:
    """Every picture by its name."""
    return {
        "map": distance_map(),
        "decay": decay(),
        "wavelengths": wavelengths(),
        "stretch": stretch(),
        "scale": scale(),
        "keys": keys(),
        "bias": bias(),
        "pairs": pairs(),
    }


def themes() -> dict[str, Spec]:
    """Vega-Lite's configuration in light and dark, the schemes' colours first."""
    return {name: _theme(name == "dark") for name in ("light", "dark")}


def strokes() -> dict[str, list[str]]:
    """The colours of the schemes and, last, of what lies past the window."""
    every = {"light": LIGHT, "dark": DARK}
    return {name: [c[n] for n in (*SCHEMES, PASSED)] for name, c in every.items()}


def _theme(dark: bool) -> Spec:
    every = DARK if dark else LIGHT
    look, name = config(1, dark), "dark" if dark else "light"
    states = dict(zip(STATES, (FAINT[name], every[0], every[1], every[PASSED]), strict=True))
    ranges = {
        "category": [every[n] for n in SCHEMES],
        "ordinal": [every[n] for n in HEADS],
        "diverging": [states[s] for s in STATES],
        "heatmap": look["range"]["heatmap"],
        "ramp": ["#4a3326", every[PASSED]] if dark else ["#fbe3d3", every[PASSED]],
    }
    past = {"fill": every[PASSED], "fillOpacity": 0.12 if dark else 0.08}
    return {**look, "range": ranges, "style": {"past": past}, "legend": {"disable": True}}


def distance_map() -> Spec:
    """Believed against true distance: a line where every pair of dimensions is told the same, a
    band where they are told different ones."""
    x, y = _x("distance", "true distance (tokens)"), _y("high", "believed distance (tokens)")
    band = _mark("area", opacity=0.25)
    truth = {"type": "line", "strokeDash": [2, 4], "color": "#8a8a8a", "strokeWidth": 1.2}
    same = [{"at": 0}, {"at": 1}]
    layers = [
        _past(x),
        {
            "data": {"values": same},
            "transform": [{"calculate": "datum.at * (length - 1)", "as": "distance"}],
            "mark": truth,
            "encoding": {"x": x, "y": {**y, "field": "distance"}},
        },
        _rule("y", "window"),
        {"mark": band, "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}},
        {"mark": _mark("line"), "encoding": {"x": x, "y": y}},
        {"mark": _mark("line", strokeWidth=1), "encoding": {"x": x, "y": {**y, "field": "low"}}},
        _pointed(x, "high", {"low": "least believed", "high": "greatest believed"}),
    ]
    return _document(layers, coloured=True)


def decay() -> Spec:
    """The mean cosine over pairs by distance, its swing as a band."""
    x = _x("distance", "distance (tokens)", "ratios")
    y = _y("mean", "mean cosine over pairs")
    ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}}
    layers = [
        _past(x),
        {"mark": _mark("area", opacity=0.16), "encoding": ends},
        {"mark": _mark("line"), "encoding": {"x": x, "y": y}},
        _pointed(x, "mean", {"mean": "mean cosine", "low": "least", "high": "greatest"}),
    ]
    return _document(layers, coloured=True)


def wavelengths() -> Spec:
    """Each pair's wavelength; above the window, a pair does not turn once in training."""
    x = _x("pair", "rotary pair", top=None)
    y = _y("scaled", "wavelength (tokens)", "log")
    tips = ["label", "pair", "scaled", "plain", "stretch", "state"]
    slow = {
        "data": {"values": [{}]},
        "transform": [{"calculate": "window", "as": "from"}],
        "mark": {"type": "rect", "style": "past", "clip": True},
        "encoding": {"y": {**y, "field": "from"}, "y2": {"value": 0}},
    }
    layers = [
        slow,
        _rule("y", "window"),
        {"mark": _mark("line", strokeWidth=1.4), "encoding": {"x": x, "y": y}},
        {"mark": _mark("point"), "encoding": {"x": x, "y": y, "tooltip": _tips(tips)}},
    ]
    return _document(layers, coloured=True)


def stretch() -> Spec:
    """How many times longer each pair's wavelength is than the model's own."""
    x = _x("pair", "rotary pair", top=None)
    y = _y("stretch", "wavelength, times the model’s own", "log")
    tips = ["label", "pair", "stretch", "state"]
    layers = [
        {"mark": _mark("line", strokeWidth=1.4), "encoding": {"x": x, "y": y}},
        {"mark": _mark("point"), "encoding": {"x": x, "y": y, "tooltip": _tips(tips)}},
    ]
    return _document(layers, coloured=True)


def scale() -> Spec:
    """The factor on a query's logits by position."""
    x = _x("position", "query position (tokens)")
    y = {**_y("factor", "factor on logits"), "scale": {"zero": False}}
    layers = [
        _past(x),
        {"mark": _mark("line"), "encoding": {"x": x, "y": y}},
        _pointed(x, "factor", {"factor": "factor", "seen": "keys seen"}),
    ]
    return _document(layers, coloured=True)


def keys() -> Spec:
    """What becomes of each token for the last one: a bar a scheme, cut where its state changes."""
    colour = {
        "field": "state",
        "type": "nominal",
        "scale": {"domain": [*STATES], "range": "diverging"},
    }
    x = _x("first", "token (the last one asks)")
    encoding = {
        "x": x,
        "x2": {"field": "end"},
        "y": {"field": "label", "type": "nominal", "title": None, "axis": {"ticks": False}},
        "color": colour,
        "tooltip": _tips(["label", "first", "last", "state"]),
    }
    bar = {"type": "bar", "height": {"band": 0.62}}
    return _document([{"mark": bar, "encoding": encoding}], height=150)


def bias() -> Spec:
    """What a few heads add to their scores by distance, of one scheme."""
    x = {**_x("distance", "distance (tokens)", "ratios", top=None)}
    y = _y("bias", "added to scores", "ratios")
    colour = {
        "field": "head",
        "type": "ordinal",
        "scale": {"range": "ordinal"},
        "legend": {"disable": False, "orient": "bottom", "title": "head", "symbolType": "stroke"},
    }
    line = {"x": x, "y": y, "color": colour, "tooltip": _tips(["head", "distance", "bias"])}
    return _document([{"mark": _mark("line"), "encoding": line}], height=210)


def pairs() -> Spec:
    """Which pairs are seen, in shades of how far apart they are believed; those past what training
    showed in another colour; hidden ones pale."""
    axis = {
        "values": [0, 10, 20, 30, 40],
        "labelExpr": SHORT.replace("datum.value", f"(datum.value / {CELLS} * length)"),
        "grid": False,
    }
    even = {"domain": [0, CELLS], "nice": False}
    x = {"field": "key", "type": "quantitative", "title": "key", "scale": even, "axis": axis}
    y = {"field": "query", "type": "quantitative", "title": "query", "axis": axis}
    place = {
        "x": x,
        "x2": {"field": "key_end"},
        "y": {**y, "scale": {**even, "reverse": True}},
        "y2": {"field": "query_end"},
        "tooltip": _tips(["query_token", "key_token", "believed"]),
    }
    shade = {"field": "believed", "type": "quantitative"}
    layers = [
        _cells("datum.believed === null", {"style": "hidden"}, place),
        _cells(
            "datum.believed !== null && !datum.past",
            {},
            place | {"color": shade | _ramp("heatmap")},
        ),
        _cells("datum.past", {}, place | {"color": shade | _ramp("ramp")}),
    ]
    return {**_document(layers, height=250), "resolve": {"scale": {"color": "independent"}}}


def _cells(test: str, look: Spec, encoding: Spec) -> Spec:
    mark = {"type": "rect", "strokeWidth": 0, **look}
    return {"transform": [{"filter": test}], "mark": mark, "encoding": encoding}


def _ramp(name: str) -> Spec:
    return {"scale": {"range": name, "domainMin": 0}, "legend": None}


def _document(layers: list[Spec], coloured: bool = False, height: int = HEIGHT) -> Spec:
    """A document as wide as its box."""
    colour = {
        "field": "column",
        "type": "nominal",
        "scale": {"domain": [*NAMES], "range": "category"},
        "legend": None,
    }
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "resize": True},
        "params": [
            {"name": "window", "value": 4096},
            {"name": "length", "value": 16384},
        ],
        "data": {"name": ROWS},
        **({"encoding": {"color": colour}} if coloured else {}),
        "layer": layers,
    }


def _x(field: str, title: str, scale: str = "even", top: str | None = "length - 1") -> Spec:
    ends: Spec = {} if top is None else {"domainMin": 0, "domainMax": {"expr": top}}
    axis: Spec = {"labelExpr": SHORT, "grid": False, "labelOverlap": True, "tickCount": 6}
    if scale == "ratios":
        axis |= {"values": [*(-t for t in reversed(TENS)), 0, *TENS]}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {**SCALES[scale], **ends},
        "axis": axis,
    }


def _y(field: str, title: str, scale: str = "even") -> Spec:
    shape = {**SCALES[scale], "nice": True} if scale == "even" else SCALES[scale]
    axis: Spec = {"labelExpr": SHORT, "labelOverlap": True, "tickCount": 5}
    return {"field": field, "type": "quantitative", "title": title, "scale": shape, "axis": axis}


def _mark(kind: str, **look: Any) -> Spec:
    """A mark of a scheme's colour; round ends make a dot of a point that stands alone."""
    usual: dict[str, Spec] = {
        "line": {"strokeWidth": 2.2, "strokeCap": "round", "clip": True},
        "area": {"clip": True, "line": False},
        "point": {"filled": True, "size": 26, "opacity": 1},
    }
    return {"type": kind, **usual.get(kind, {}), **look}


def _past(x: Spec) -> Spec:
    """The part of a picture that lies past the trained window."""
    return {
        "data": {"values": [{}]},
        "transform": [
            {"filter": "length > window"},
            {"calculate": "window", "as": "from"},
            {"calculate": "length - 1", "as": "to"},
        ],
        "mark": {"type": "rect", "style": "past", "clip": True},
        "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}},
    }


def _rule(axis: str, param: str) -> Spec:
    """A dashed line at a parameter's number."""
    return {
        "data": {"values": [{}]},
        "transform": [{"calculate": param, "as": "at"}],
        "mark": {"type": "rule", "strokeDash": [6, 4], "clip": True},
        "encoding": {axis: {"field": "at", "type": "quantitative"}},
    }


def _pointed(x: Spec, y: str, named: dict[str, str]) -> Spec:
    """Unseen points that answer a pointer."""
    place = {"x": x, "y": {"field": y, "type": "quantitative"}}
    tips = _tips(["label", x["field"], *named])
    mark = {"type": "point", "filled": True, "size": 90, "opacity": 0}
    return {"mark": mark, "encoding": {**place, "tooltip": tips}}


def _tips(names: list[str]) -> list[Spec]:
    words = {"label": "scheme", "query_token": "query", "key_token": "key"}
    texts = ("label", "state", "head")
    return [
        {"field": n, "title": words.get(n, n), "type": "nominal"}
        if n in texts
        else {"field": n, "title": words.get(n, n), "type": "quantitative", "format": ",.4~f"}
        for n in names
    ]
