"""What the pictures of the page are made of: documents, axes and marks in Vega-Lite."""

from __future__ import annotations

from typing import Any

from longitude.viz.figures import SHORT

Spec = dict[str, Any]
ROWS = "rows"  # the name of a picture's data
NAMES = "ABC"  # of the schemes beside each other
HEIGHT = 250
COLOUR: Spec = {
    "field": "column",
    "type": "nominal",
    "scale": {"domain": [*NAMES], "range": "category"},
    "legend": None,
}
TENS = [10**n for n in range(10)]
BOTH = [*(-t for t in reversed(TENS)), 0, *TENS]
TICKS = {"log": TENS, "twos": [2.0**n for n in range(-8, 24)], "ratios": BOTH}
SCALES: dict[str, Spec] = {
    "even": {"type": "linear", "nice": False},
    "ratios": {"type": "symlog", "nice": False},
    "log": {"type": "log", "nice": False},
    "twos": {"type": "log", "base": 2, "nice": False},
}


def document(layers: list[Spec], height: int = HEIGHT) -> Spec:
    """A document as wide as its box."""
    return {
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "resize": True},
        "params": [
            {"name": "window", "value": 4096},
            {"name": "length", "value": 16384},
        ],
        "data": {"name": ROWS},
        "layer": layers,
    }


def across(field: str, title: str, scale: str = "even", top: str | None = "length - 1") -> Spec:
    """The horizontal axis, up to an expression's number or as far as the rows go."""
    ends: Spec = {} if top is None else {"domainMin": 0, "domainMax": {"expr": top}}
    axis: Spec = {"labelExpr": SHORT, "grid": False, "labelOverlap": True, "tickCount": 6}
    axis |= {"values": TICKS[scale]} if scale in TICKS else {}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {**SCALES[scale], **ends},
        "axis": axis,
    }


def upward(field: str, title: str, scale: str = "even") -> Spec:
    """The vertical axis."""
    shape = {**SCALES[scale], "nice": True} if scale == "even" else SCALES[scale]
    axis: Spec = {"labelExpr": SHORT, "labelOverlap": True, "tickCount": 5}
    axis |= {"values": TICKS[scale]} if scale in TICKS else {}
    return {"field": field, "type": "quantitative", "title": title, "scale": shape, "axis": axis}


def mark(kind: str, **look: Any) -> Spec:
    """A mark of a scheme's colour; round ends make a dot of a point that stands alone."""
    usual: dict[str, Spec] = {
        "line": {"strokeWidth": 2.2, "strokeCap": "round", "clip": True},
        "area": {"clip": True, "line": False},
        "point": {"filled": True, "size": 26, "opacity": 1},
    }
    return {"type": kind, **usual.get(kind, {}), **look}


def of_schemes(drawn: Spec, x: Spec, y: Spec, **more: Any) -> Spec:
    """A mark in the colour of each scheme."""
    return {"mark": drawn, "encoding": {"x": x, "y": y, "color": COLOUR, **more}}


def past_window(x: Spec) -> Spec:
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


def rule(axis: str, param: str) -> Spec:
    """A dashed line at a parameter's number."""
    return {
        "data": {"values": [{}]},
        "transform": [{"calculate": param, "as": "at"}],
        "mark": {"type": "rule", "strokeDash": [6, 4], "clip": True},
        "encoding": {axis: {"field": "at", "type": "quantitative"}},
    }


def pointed(x: Spec, y: str, named: dict[str, str]) -> Spec:
    """Unseen points that answer a pointer."""
    place = {"x": x, "y": {"field": y, "type": "quantitative"}}
    told = tips(["label", x["field"], *named])
    unseen = {"type": "point", "filled": True, "size": 90, "opacity": 0}
    return {"mark": unseen, "encoding": {**place, "tooltip": told}}


def tips(names: list[str]) -> list[Spec]:
    """What a pointer is told, by the names of fields."""
    words = {"label": "scheme", "query_token": "query", "key_token": "key"}
    texts = ("label", "state", "head")
    return [
        {"field": n, "title": words.get(n, n), "type": "nominal"}
        if n in texts
        else {"field": n, "title": words.get(n, n), "type": "quantitative", "format": ",.4~f"}
        for n in names
    ]
