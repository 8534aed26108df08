"""Building blocks of every chart: Vega-Lite channels, axes, marks and layers as dictionaries.

A chart is a list of layers over one named data set (`ROWS`), so that a page can read a chart's rows
and replace them. Everything that is not a row (the trained window, the length, the method under the
pointer) is a parameter.

Specs name no colours, so one spec serves light and dark pages: marks take their colours from the
ranges and styles of `config`. The palette is Okabe and Ito's, which colour-blind readers can tell
apart, with lighter variants on dark; index 0 is grey, the baseline's.
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
CHOSEN: Spec = {"name": "chosen", "value": None}  # the method under the pointer
POINTED = "!chosen || chosen == datum.label"
STRENGTH: Spec = {
    "condition": {"test": POINTED, "value": 1.0},
    "value": 0.12,
}  # opacity of methods

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, monospace"
LIGHT = ("#6b6b6b", "#0072B2", "#D55E00", "#009E73", "#B4508B", "#C98500", "#3A9BD9", "#6A4FB3")
DARK = ("#a8a8a8", "#5AA9E6", "#F08A4B", "#3CC79B", "#E59AC4", "#F0B93A", "#8FD0F5", "#A895E8")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
SCHEMES = (1, 4, 3)  # colours of schemes side by side: blue, pink and green
ORDINAL = (1, 4, 3, 6, 5)  # colours of heads, and of what scaling does to rotary pairs
PAST = 2  # orange: past the trained window, and nothing else
INK = ("#262422", "#e8e6e3")  # on light and on dark pages, as all pairs below
SOFT, LINE = ("#6d6964", "#a9a6a1"), ("#e9e5e0", "#3a3836")
DROPPED, HIDDEN = ("#d9d4cd", "#3b3836"), ("#e9e6e2", "#2c2a28")
HEAT = (["#f6efe8", "#bcd5e6", "#5f9fcb", "#005f96"], ["#2b2927", "#2c4a60", "#3f82b3", "#9ad2f7"])
RAMP, SHADE = ("#fbe3d3", "#4a3326"), (0.09, 0.13)  # past the window: cells, and the background


@dataclass(frozen=True)
class Chart:
    """A chart with its heading, how to read it, and the rows that it draws."""

    name: str
    title: str
    reading: str
    spec: Spec
    rows: Rows = ()
    measure: str = ""
    label: str | None = None  # the method, if the chart shows only one


def channel(field: str, **more: Any) -> Spec:
    """An encoding channel from altair's shorthand, as in "mean:Q"."""
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
    """A mark in this package's style; with round line ends an isolated point shows as a dot."""
    return {"type": kind, **MARKS.get(kind, {}), **look}


def layer(drawn: str | Spec, rows: Rows | None = None, where: str = "", **encoding: Any) -> Spec:
    """A mark with its channels (strings are shorthand), over the chart's rows or over `rows` of its
    own; `where` keeps the rows that satisfy a Vega expression."""
    channels = {k: channel(v) if isinstance(v, str) else v for k, v in encoding.items()}
    spec: Spec = {"mark": mark(drawn) if isinstance(drawn, str) else drawn, "encoding": channels}
    if rows is not None:
        spec["data"] = {"values": [*rows]}
    return spec | ({"transform": [{"filter": where}]} if where else {})


def document(
    layers: Sequence[Spec], rows: Rows | None = None, height: int = 250, **more: Any
) -> Spec:
    """A chart as wide as its container on a page; without `rows`, the page supplies the data."""
    size: Spec = {"width": "container", "height": height}
    size["autosize"] = {"type": "fit-x", "resize": True}
    data = {} if rows is None else {"datasets": {ROWS: [*rows]}}
    return {**size, "params": [CHOSEN], "data": {"name": ROWS}, **more, "layer": [*layers], **data}


def inset(spec: Spec, rows: Rows, **more: Any) -> Spec:
    """A chart to embed in a larger document: without parameters, and with its rows inline."""
    inner = {k: v for k, v in spec.items() if k not in ("params", "autosize", "datasets", "width")}
    return {**inner, "data": {"values": [*rows]}, **more}


def keyed(spec: Spec) -> Spec:
    """The same chart with a legend of colours and dashes, for use outside a page that has one."""
    look: Spec = {"title": None, "orient": "bottom", "columns": 3, "labelLimit": 260}
    stroke: Spec = {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2.5}
    legend = {"legend": {**look, **stroke, "symbolSize": 260}}
    layers = []
    for drawn in spec["layer"]:
        channels = drawn["encoding"]
        named = {k: channels[k] | legend for k in ("color", "strokeDash") if k in channels}
        layers.append(drawn | {"encoding": channels | named})
    return {**spec, "layer": layers}


def tooltip(*names: str, **titles: str) -> list[Spec]:
    """The fields of a tooltip, in shorthand, titled by their names or as in `titles`."""
    return [
        channel(name, title=titles.get(name[:-2], name[:-2].replace("_", " ")))
        | ({"format": ",.4~f"} if name.endswith("Q") else {})
        for name in names
    ]


def level(name: str, at: float, values: Sequence[float], channel: str = "y") -> list[Spec]:
    """A dashed rule with its name, if it lies within the range of the values drawn."""
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


def stroke(index: int) -> tuple[int, int]:
    """Indices of the colour and the dash of the method with this index; the first is grey."""
    count = len(LIGHT) - 1
    return (0, 0) if index == 0 else (1 + (index - 1) % count, (index - 1) // count % len(DASHES))


def dashes(indices: Sequence[int]) -> list[list[int]]:
    return [DASHES[stroke(n)[1]] for n in indices]


def config(category: Sequence[int] = SCHEMES, dark: bool = False) -> Spec:
    """Vega-Lite's configuration; `category` holds the palette indices of schemes or methods."""
    palette = DARK if dark else LIGHT
    ink, soft, line = INK[dark], SOFT[dark], LINE[dark]
    text = {"labelColor": soft, "titleColor": soft, "titleFontWeight": "normal"}
    sizes = {"labelFontSize": 11.5, "titleFontSize": 12, "titlePadding": 10, "labelPadding": 6}
    placed = {"anchor": "start", "frame": "group"}
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": {**text, **sizes, "gridColor": line, "domainColor": line, "tickColor": line},
        "legend": {"labelColor": ink, "titleColor": soft, "labelFont": MONO},
        "title": {"color": ink, "subtitleColor": soft, "fontSize": 15, **placed},
        "text": {"color": ink},
        "rule": {"color": soft},
        "range": {
            "category": [palette[n] for n in category],
            "ordinal": [palette[n] for n in ORDINAL],
            "diverging": [DROPPED[dark], palette[0], palette[1], palette[PAST]],  # of tokens
            "heatmap": HEAT[dark],
            "ramp": [RAMP[dark], palette[PAST]],
        },
        "style": {
            "past": {"color": palette[PAST], "opacity": SHADE[dark]},
            "hidden": {"color": HIDDEN[dark]},
            "faint": {"color": palette[0]},
            "better": {"color": palette[1]},
            "worse": {"color": palette[PAST]},
        },
    }


def themes(category: Sequence[int] = SCHEMES) -> dict[str, Spec]:
    """The configurations of light and dark pages."""
    return {"light": config(category), "dark": config(category, dark=True)}


def method_themes(count: int, first: int = 0) -> dict[str, Spec]:
    """The `themes` of `count` methods; the first is the baseline's grey if `first` is 0."""
    return themes([stroke(first + n)[0] for n in range(count)])
