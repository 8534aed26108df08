"""The pictures of the page, in Vega-Lite: drawn once, then fed with new rows as controls move.

Their rows go by one name, and what is not a row (the trained window, the length, the names of the
schemes) by parameters. A spec names no colour of the theme, so that one spec serves light and dark;
what lies past the trained window has a colour of its own, which no scheme has.

How the page's pictures look, in light and dark.

The schemes beside each other have three of the reports' colours, which the colour-blind can tell
apart; what lies past the trained window has a fourth, and nothing else has it.
"""

from __future__ import annotations

from longitude.explorer.vega import (
    Spec,
    across,
    document,
    mark,
    of_schemes,
    past_window,
    pointed,
    rule,
    tips,
    upward,
)
from longitude.explorer.visibility import STATES
from longitude.viz.figures import SHORT
from longitude.viz.theme import DARK, LIGHT, config

CELLS = 40  # tokens on each side of the picture of pairs


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


def distance_map() -> Spec:
    """Believed against true distance: a line where every pair of dimensions is told the same, a
    band where they are told different ones."""
    x, y = (
        across("distance", "true distance (tokens)"),
        upward("high", "believed distance (tokens)"),
    )
    band = mark("area", opacity=0.25)
    truth = {"type": "line", "strokeDash": [2, 4], "color": "#8a8a8a", "strokeWidth": 1.2}
    same = [{"at": 0}, {"at": 1}]
    layers = [
        past_window(x),
        {
            "data": {"values": same},
            "transform": [{"calculate": "datum.at * (length - 1)", "as": "distance"}],
            "mark": truth,
            "encoding": {"x": x, "y": {**y, "field": "distance"}},
        },
        rule("y", "window"),
        of_schemes(band, x, {**y, "field": "low"}, y2={"field": "high"}),
        of_schemes(mark("line"), x, y),
        of_schemes(mark("line", strokeWidth=1), x, {**y, "field": "low"}),
        pointed(x, "high", {"low": "least believed", "high": "greatest believed"}),
    ]
    return document(layers)


def decay() -> Spec:
    """The mean cosine over pairs by distance, its swing as a band."""
    x = across("distance", "distance (tokens)", "ratios")
    y = upward("mean", "mean cosine over pairs")
    layers = [
        past_window(x),
        of_schemes(mark("area", opacity=0.16), x, {**y, "field": "low"}, y2={"field": "high"}),
        of_schemes(mark("line"), x, y),
        pointed(x, "mean", {"mean": "mean cosine", "low": "least", "high": "greatest"}),
    ]
    return document(layers)


def wavelengths() -> Spec:
    """Each pair's wavelength; above the window, a pair does not turn once in training."""
    x = across("pair", "rotary pair", top=None)
    y = upward("scaled", "wavelength (tokens)", "log")
    told = ["label", "pair", "scaled", "plain", "stretch", "state"]
    slow = {
        "data": {"values": [{}]},
        "transform": [{"calculate": "window", "as": "from"}],
        "mark": {"type": "rect", "style": "past", "clip": True},
        "encoding": {"y": {**y, "field": "from"}, "y2": {"value": 0}},
    }
    layers = [
        slow,
        rule("y", "window"),
        of_schemes(mark("line", strokeWidth=1.4), x, y),
        of_schemes(mark("point"), x, y, tooltip=tips(told)),
    ]
    return document(layers)


def stretch() -> Spec:
    """How many times longer each pair's wavelength is than the model's own."""
    x = across("pair", "rotary pair", top=None)
    y = upward("stretch", "times the model’s own", "twos")
    told = ["label", "pair", "stretch", "state"]
    least = {**y, "scale": {**y["scale"], "domain": {"unionWith": [1, 2]}}}
    layers = [
        of_schemes(mark("line", strokeWidth=1.4), x, least),
        of_schemes(mark("point"), x, y, tooltip=tips(told)),
    ]
    return document(layers)


def scale() -> Spec:
    """The factor on a query's logits by position."""
    x = across("position", "query position (tokens)")
    y = {**upward("factor", "factor on logits"), "scale": {"zero": False}}
    layers = [
        past_window(x),
        of_schemes(mark("line"), x, y),
        pointed(x, "factor", {"factor": "factor", "seen": "keys seen"}),
    ]
    return document(layers)


def keys() -> Spec:
    """What becomes of each token for the last one: a bar a scheme, cut where its state changes."""
    colour = {
        "field": "state",
        "type": "nominal",
        "scale": {"domain": [*STATES], "range": "diverging"},
        "legend": None,
    }
    x = across("first", "token (the last one asks)")
    encoding = {
        "x": x,
        "x2": {"field": "end"},
        "y": {"field": "label", "type": "nominal", "title": None, "axis": {"ticks": False}},
        "color": colour,
        "tooltip": tips(["label", "first", "last", "state"]),
    }
    bar = {"type": "bar", "height": {"band": 0.62}}
    return document([{"mark": bar, "encoding": encoding}], height=150)


def bias() -> Spec:
    """What a few heads add to their scores by distance, of one scheme."""
    x = {**across("distance", "distance (tokens)", "ratios", top=None)}
    y = upward("bias", "added to scores", "ratios")
    colour = {
        "field": "head",
        "type": "ordinal",
        "scale": {"range": "ordinal"},
        "legend": {"orient": "bottom", "title": "head", "symbolType": "stroke"},
    }
    line = {"x": x, "y": y, "color": colour, "tooltip": tips(["head", "distance", "bias"])}
    return document([{"mark": mark("line"), "encoding": line}], height=210)


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
        "tooltip": tips(["query_token", "key_token", "believed"]),
    }
    near, far = _shade("heatmap", "0", "window"), _shade("ramp", "window", "length")
    layers = [
        _cells("datum.believed === null", {"style": "hidden"}, place),
        _cells("datum.believed !== null && !datum.past", {}, place | {"color": near}),
        _cells("datum.past", {}, place | {"color": far}),
    ]
    return {**document(layers, height=250), "resolve": {"scale": {"color": "independent"}}}


def _cells(test: str, look: Spec, encoding: Spec) -> Spec:
    rect = {"type": "rect", "strokeWidth": 0, **look}
    return {"transform": [{"filter": test}], "mark": rect, "encoding": encoding}


def _shade(colours: str, low: str, high: str) -> Spec:
    """The believed distance as a colour, from one number to another."""
    ends = [{"expr": low}, {"expr": high}]
    scale = {"range": colours, "interpolate": "rgb", "nice": False, "domain": ends, "clamp": True}
    return {"field": "believed", "type": "quantitative", "scale": scale, "legend": None}


SCHEMES = (1, 4, 3)  # of the reports' colours: blue, pink and green
PASSED = 2  # orange
HEADS = (1, 4, 3, 6)
FAINT = {"light": "#d9d4cd", "dark": "#3b3836"}


def themes() -> dict[str, Spec]:
    """Vega-Lite's configuration in light and dark, the schemes' colours first."""
    return {name: _theme(name == "dark") for name in ("light", "dark")}


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
    past = {"color": every[PASSED], "opacity": 0.13 if dark else 0.09}
    styles = {"past": past, "hidden": {"color": FAINT[name], "opacity": 0.55}}
    return {**look, "range": ranges, "style": styles}
