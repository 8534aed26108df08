"""What every chart is built of: Vega-Lite channels, axes, marks and layers as plain dictionaries.

A chart is a list of layers over rows that go by one name (`ROWS`), so that a page can ask a chart
for its numbers and feed it new ones. What is not a row (the trained window, the length, the method
that is pointed at) is a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]
ROWS = "rows"  # the name of a chart's data
TYPES = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
COUNT = "format(datum.value, ',')"
SHORT = (  # 0, 500, 20k, 3M
    "abs(datum.value) >= 1e6 ? format(datum.value / 1e6, '.3~g') + 'M' : "
    "abs(datum.value) >= 1e4 ? format(datum.value / 1e3, '.3~g') + 'k' : "
    "format(datum.value, '.4~g')"
)
TENS = [10**n for n in range(10)]
TICKS = {
    "log": TENS,
    "log2": [2.0**n for n in range(-8, 24)],
    "symlog": [*(-t for t in reversed(TENS)), 0, *TENS],
}
MARKS: dict[str, Spec] = {
    "line": {"strokeWidth": 2.2, "strokeCap": "round", "strokeJoin": "round"},
    "area": {"clip": True, "line": False},
    "circle": {"opacity": 1},
    "rule": {"strokeDash": [5, 4], "clip": True},
    "text": {"fontSize": 11},
}
CHOSEN: Spec = {"name": "chosen", "value": None}  # the method that is pointed at
POINTED = "!chosen || chosen == datum.label"


@dataclass(frozen=True)
class Chart:
    """A chart with its heading, how to read it, and the rows that it draws."""

    name: str
    title: str
    reading: str
    spec: Spec
    rows: Rows = ()
    measure: str = ""
    label: str | None = None  # of the one method that it is of


def channel(field: str, **more: Any) -> Spec:
    """An encoding channel by altair's shorthand: "mean:Q"."""
    name, _, kind = field.partition(":")
    return {"field": name, "type": TYPES[kind], **more}


def axis(
    field: str, title: str | None, scale: str = "linear", *, ends: Spec | None = None, **look: Any
) -> Spec:
    """A quantitative channel with its scale (linear, log, log2, symlog) and axis."""
    kind = {"type": "log", "base": 2} if scale == "log2" else {"type": scale}
    ticks: Spec = {"values": TICKS[scale]} if scale in TICKS else {"tickCount": 6}
    drawn = {"labelExpr": SHORT, "labelOverlap": True, **ticks, **look}
    shape = {**kind, "nice": False, **(ends or {})}
    return channel(f"{field}:Q", title=title, scale=shape, axis=drawn)


def mark(kind: str, **look: Any) -> Spec:
    """A mark in this package's style; round ends make a dot of a point that stands alone."""
    return {"type": kind, **MARKS.get(kind, {}), **look}


def layer(drawn: str | Spec, rows: Rows | None = None, where: str = "", **encoding: Any) -> Spec:
    """A mark and its channels (texts in shorthand), over the chart's rows or over its own; `where`
    keeps those rows that satisfy an expression."""
    channels = {k: channel(v) if isinstance(v, str) else v for k, v in encoding.items()}
    spec: Spec = {"mark": mark(drawn) if isinstance(drawn, str) else drawn, "encoding": channels}
    if rows is not None:
        spec["data"] = {"values": [*rows]}
    return spec | ({"transform": [{"filter": where}]} if where else {})


def document(
    layers: Sequence[Spec], rows: Rows | None = None, height: int = 250, **more: Any
) -> Spec:
    """A chart as wide as its box on a page; without rows, the page feeds it."""
    size: Spec = {"width": "container", "height": height}
    size["autosize"] = {"type": "fit-x", "resize": True}
    data = {} if rows is None else {"datasets": {ROWS: [*rows]}}
    return {**size, "params": [CHOSEN], "data": {"name": ROWS}, **more, "layer": [*layers], **data}


def inset(spec: Spec, rows: Rows, **more: Any) -> Spec:
    """A chart inside a larger document: without parameters, and with rows of its own."""
    inner = {k: v for k, v in spec.items() if k not in ("params", "autosize", "datasets", "width")}
    return {**inner, "data": {"values": [*rows]}, **more}


def keyed(spec: Spec) -> Spec:
    """The same chart with a key to its colours and dashes, where no page has one beside it."""
    look: Spec = {"title": None, "orient": "bottom", "columns": 3, "labelLimit": 260}
    stroke: Spec = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2.5}
    legend = {"legend": {**look, **stroke, "symbolSize": 260}}

    def with_key(channels: Spec) -> Spec:
        named = {k: channels[k] | legend for k in ("color", "strokeDash") if k in channels}
        return channels | named

    layers = [each | {"encoding": with_key(each["encoding"])} for each in spec["layer"]]
    return {**spec, "layer": layers}


def tooltip(*names: str, **titles: str) -> list[Spec]:
    """What a pointer is shown: fields in shorthand, by their names or by the titles given."""
    return [
        channel(name, title=titles.get(name[:-2], name[:-2].replace("_", " ")))
        | ({"format": ",.4~f"} if name.endswith("Q") else {})
        for name in names
    ]


def level(name: str, at: float, values: Sequence[float], channel: str = "y") -> list[Spec]:
    """A dashed rule with its name, if it lies among the values drawn."""
    low, high = min(values), max(values)
    if not low <= at <= high:
        return []
    rows = [{"at": at, "name": name}]
    side = "left" if at == low or channel == "y" else "right" if at == high else "center"
    text = mark("text", align=side, baseline="bottom", dy=-5, dx=5 if channel == "y" else 0)
    other: Spec = {"x": {"value": 0}} if channel == "y" else {"y": {"value": 0}}
    return [
        layer("rule", rows, **{channel: "at:Q"}),
        layer(text, rows, **{channel: "at:Q"}, text="name:N", **other),
    ]


def strength(full: float = 1.0, faint: float = 0.12) -> Spec:
    """Opacity: all methods alike, or the one pointed at above the others."""
    return {"condition": {"test": POINTED, "value": full}, "value": faint}
