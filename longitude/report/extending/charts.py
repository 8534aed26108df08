"""The charts of `longitude extend`, in Vega-Lite: each has its rows under one name, so that a page
can be asked for the numbers behind a picture, and the trained window stands in each as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from longitude.eval.compare import Board, Interval
from longitude.report.extending.look import dashes
from longitude.report.extending.section import SHARES, Section

ROWS = "rows"  # the name of a chart's data
COUNT = "format(datum.value, ',')"
CHOSEN = {"name": "chosen", "value": None}  # the label that is pointed at: the others grow faint
TESTED = "!chosen || chosen == datum.label"
HEIGHT, CELL = 300, 22
STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8)  # numbers on an axis of equal ratios, times powers of ten
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A picture with its name, its heading, what one reads off it, and its rows."""

    name: str
    title: str
    reading: str
    spec: dict[str, Any]
    rows: Rows
    measure: str
    label: str | None = None  # of the one method that it is of


def charts(section: Section) -> list[Chart]:
    """Every chart that the section has numbers for."""
    by_length = [m for m in ("context", *SHARES) if m in section.boards]
    return [
        *_by_position(section),
        *(chart for m in by_length for chart in _by_length(section, section.boards[m])),
        *_heatmaps(section),
        *_distances(section),
        *_cost(section),
    ]


def _by_position(section: Section) -> Iterable[Chart]:
    rows = [
        {"label": s, "first": a, "past": b, "x": math.sqrt((a + 1) * b), **_numbers(v)}
        for s in section.labels
        for a, b, v in section.curves.get(s, ())
    ]
    if rows:
        reading = "Where a line rises past the trained window, the method loses the thread there."
        spec = _lines(section, rows, "position (tokens)", _losses(rows))
        yield Chart("loss", "Loss by position", reading, spec, rows, "loss")


def _by_length(section: Section, board: Board) -> Iterable[Chart]:
    rows = [
        {"label": s, "length": n, "x": n, **_numbers(cell.value)}
        for s in section.labels
        for n in board.lengths
        if (cell := board.cells.get((s, n))) and cell.value
    ]
    if not rows:
        return
    shares = board.measure in SHARES
    axis = alt.Axis(format="%", tickCount=5)
    scale = alt.Scale(domain=[0, 1])
    y = alt.Y("mean:Q", title=board.unit, scale=scale, axis=axis) if shares else _losses(rows)
    x = "length (tokens)" if shares else "tokens read before and with the scored ones"
    spec = _lines(section, rows, x, y, dots=True)
    yield Chart(board.measure, board.title, READING[board.measure], spec, rows, board.measure)


READING = {
    "context": "A useful method goes down: more context, lower loss of the very same tokens.",
    "passkey": "The share of hidden numbers that the model gives back.",
    "keys": "One of several hidden numbers is asked for by its name.",
    "variables": "A chain of assignments is to be followed to its end.",
    "distance": "The distance that the model is told, by true distance. Where its pairs, heads or "
    "layers are told different ones, a band lies between the least and the greatest. What stays "
    "under the level rule was seen in training.",
}


def _heatmaps(section: Section) -> Iterable[Chart]:
    for index, (label, cells) in enumerate(section.grids.items()):
        rows = [
            {"label": label, "length": n, "depth": depth, **_numbers(v)}
            for (n, depth), v in sorted(cells.items())
        ]
        reading = "Across: length in tokens; down: how deep in the text the number stands."
        spec = _heatmap(section, rows)
        yield Chart(f"grid-{index}", "Passkeys by depth", reading, spec, rows, "passkey", label)


def _heatmap(section: Section, rows: Rows) -> dict[str, Any]:
    look: dict[str, Any] = {"labelAngle": 0, "labelOverlap": True, "ticks": False, "domain": False}
    every = [*section.boards["passkey"].lengths]  # those too that were refused: they stay empty
    apart: dict[str, Any] = {"paddingInner": 0.05, "paddingOuter": 0}
    across, down = alt.Scale(domain=every, **apart), alt.Scale(**apart)
    x = alt.X("length:O", title=None, axis=alt.Axis(labelExpr=COUNT, **look), scale=across)
    y = alt.Y("depth:O", title=None, axis=alt.Axis(format=".0%", **look), scale=down)
    scale = alt.Scale(domain=[0, 1], range="heatmap", interpolate="rgb")
    tint = alt.Color("mean:Q", scale=scale, legend=None)
    data = alt.Chart(alt.NamedData(ROWS))
    layers: list[Any] = [data.mark_rect().encode(x, y, tint, tooltip=_tips(rows))]
    if min(every) <= section.subject.trained < max(every):
        inside = max(n for n in every if n <= section.subject.trained)
        edge = alt.Chart(alt.InlineData([{"length": inside}]))
        rule = edge.mark_rule(strokeWidth=1.5, xOffset=1)
        layers.append(rule.encode(alt.X("length:O", bandPosition=1)))
    return _spec(layers, rows, CELL * len({r["depth"] for r in rows}))


def _distances(section: Section) -> Iterable[Chart]:
    rows = [
        {"label": s, "x": x, "low": low, "high": high}
        for s in section.labels
        for x, low, high in section.maps.get(s, ())
    ]
    if not rows:
        return
    told, x = "believed distance (tokens)", _x(rows, "true distance (tokens)", log=False)
    colour, dash, data = _colour(section), _dash(section), alt.Chart(alt.NamedData(ROWS))
    band = data.transform_filter("isValid(datum.high) && datum.high > datum.low").mark_area()
    line = data.mark_line(strokeWidth=2)
    layers = [
        *_trained(section, rows),
        _level(section),
        band.encode(x, _y(told, "high"), alt.Y2("low:Q"), colour, opacity=_faint(0.12, 0.02)),
        *(
            line.encode(x, _y(told, end), colour, dash, opacity=_faint(), tooltip=_tips(rows))
            for end in ("high", "low")
        ),
    ]
    spec = _spec(layers, rows)
    yield Chart("distance", "Distance map", READING["distance"], spec, rows, "distance")


def _cost(section: Section) -> Iterable[Chart]:
    board, speed = section.main, section.boards.get("prefill")
    if board is None or speed is None:
        return
    at = max(n for n in board.lengths if n in speed.lengths)
    pairs = [(s, board.cells[s, at].value, speed.cells[s, at].value) for s in speed.labels]
    rows = [{"label": s, "x": fast.mean, **_numbers(v)} for s, v, fast in pairs if v and fast]
    if rows:
        way = "down" if board.lower_is_better else "up"
        reading = f"{board.title} against speed, at {at:,} tokens. Better is right and {way}."
        spec = _scatter(section, board, rows)
        yield Chart("cost", "Cost against quality", reading, spec, rows, "prefill")


def _scatter(section: Section, board: Board, rows: Rows) -> dict[str, Any]:
    """A dot for each method with its name beside it, on the side where there is room."""
    axis = alt.Axis(labelExpr=COUNT, labelOverlap=True, tickCount=5, grid=False)
    scale = alt.Scale(zero=False, padding=24)
    x = alt.X("x:Q", title="prefill (tokens a second)", scale=scale, axis=axis)
    y = _losses(rows) if board.lower_is_better else _y(board.unit, "mean")
    colour, data = _colour(section), alt.Chart(alt.NamedData(ROWS))
    ends = (alt.Y("low:Q"), alt.Y2("high:Q"))
    middle = (min(r["x"] for r in rows) + max(r["x"] for r in rows)) / 2
    look: dict[str, Any] = {"fontSize": 11, "font": "ui-monospace, monospace", "limit": 150}
    sides: Any = (("<=", "left", 10), (">", "right", -10))
    layers = [
        data.mark_rule(strokeWidth=1.5).encode(x, *ends, colour, opacity=_faint(0.5)),
        data.mark_circle(size=90).encode(x, y, colour, opacity=_faint(), tooltip=_tips(rows)),
        *(
            data.transform_filter(f"datum.x {sign} {middle!r}")
            .mark_text(align=side, dx=by, **look)
            .encode(x, y, text="label:N", opacity=_faint())
            for sign, side, by in sides
        ),
    ]
    return _spec(layers, rows)


def _lines(
    section: Section, rows: Rows, title: str, y: alt.Y, dots: bool = False
) -> dict[str, Any]:
    """A line for each method with its interval as a band; the trained window as a rule."""
    data, x = alt.Chart(alt.NamedData(ROWS)), _x(rows, title)
    colour, dash = _colour(section), _dash(section)
    ends = (alt.Y("low:Q"), alt.Y2("high:Q"))
    layers = [
        *_trained(section, rows),
        data.mark_area().encode(x, *ends, colour, opacity=_faint(0.13, 0.02)),
        data.mark_line(strokeWidth=2.2, strokeCap="round", strokeJoin="round").encode(
            x, y, colour, dash, opacity=_faint()
        ),
        data.mark_circle(size=46 if dots else 14).encode(
            x, y, colour, opacity=_faint(), tooltip=_tips(rows)
        ),
    ]
    return _spec(layers, rows)


def _spec(layers: Sequence[Any], rows: Rows, height: int = HEIGHT) -> dict[str, Any]:
    """A document as wide as its box; its rows go by one name."""
    spec = alt.layer(*layers).to_dict(validate=False)
    spec.pop("config", None)
    size = {"width": "container", "height": height, "autosize": {"type": "fit-x", "resize": True}}
    return {
        **spec,
        **size,
        "params": [CHOSEN],
        "datasets": {**spec.get("datasets", {}), ROWS: rows},
    }


def _x(rows: Rows, title: str, log: bool = True) -> alt.X:
    scale = alt.Scale(type="log", base=2, nice=False, padding=12) if log else alt.Scale(nice=False)
    lengths = sorted({r["length"] for r in rows if "length" in r})
    ticks: dict[str, Any] = {"values": lengths} if lengths else {"tickCount": 6}
    axis = alt.Axis(labelExpr=COUNT, labelOverlap=True, grid=False, **ticks)
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def _y(title: str, name: str) -> alt.Y:
    return alt.Y(f"{name}:Q", title=title, axis=alt.Axis(tickCount=5))


def _losses(rows: Rows) -> alt.Y:
    """Equal ratios look equal; there are none to 0."""
    low, high = min(r["low"] for r in rows), max(r["high"] for r in rows)
    scale, ticks = alt.Scale(zero=False), [s * 10.0**e for e in range(-4, 5) for s in STEPS]
    look: dict[str, Any] = {"tickCount": 5}
    if low > 0 and high > 2 * low:
        scale = alt.Scale(type="log", domain=[low / 1.05, high * 1.05], nice=False)
        look = {"values": [t for t in ticks if low / 1.05 <= t <= high * 1.05]}
    axis = alt.Axis(format=".3~g", labelOverlap=True, **look)
    return alt.Y("mean:Q", title="loss (nats a token)", scale=scale, axis=axis)


def _trained(section: Section, rows: Rows) -> list[Any]:
    at, xs = section.subject.trained, [r["x"] for r in rows]
    if not min(xs) <= at <= max(xs):
        return []
    data = alt.Chart(alt.InlineData([{"x": at, "name": f"trained window {at:,}"}]))
    side: Any = "left" if at == min(xs) else "right" if at == max(xs) else "center"
    words = data.mark_text(baseline="bottom", fontSize=11, dy=-5, align=side)
    return [
        data.mark_rule(strokeDash=[4, 4]).encode(alt.X("x:Q")),
        words.encode(alt.X("x:Q"), text="name:N", y=alt.value(0)),
    ]


def _level(section: Section) -> Any:
    data = alt.Chart(alt.InlineData([{"high": section.subject.trained}]))
    return data.mark_rule(strokeDash=[4, 4]).encode(alt.Y("high:Q"))


def _colour(section: Section) -> alt.Color:
    return alt.Color("label:N", scale=alt.Scale(domain=[*section.labels]), legend=None)


def _dash(section: Section) -> alt.StrokeDash:
    scale = alt.Scale(domain=[*section.labels], range=dashes(len(section.labels)))
    return alt.StrokeDash("label:N", scale=scale, legend=None)


def _faint(full: float = 1.0, faint: float = 0.12) -> Any:
    return {"condition": {"test": TESTED, "value": full}, "value": faint}


def _numbers(value: Interval) -> dict[str, Any]:
    return {"mean": value.mean, "low": value.low, "high": value.high, "n": value.n}


def _tips(rows: Rows) -> list[alt.Tooltip]:
    named = [name for name in rows[0] if not (name == "x" and "length" in rows[0])]
    look: dict[str, Any] = {"format": ",.4~f"}
    numbers = ("mean", "low", "high", "x")
    return [
        alt.Tooltip(f"{n}:{'N' if n == 'label' else 'Q'}", **(look if n in numbers else {}))
        for n in named
    ]
