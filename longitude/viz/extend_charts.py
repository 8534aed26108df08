"""The charts of `longitude extend`, in Vega-Lite: each has its rows under one name, so that a page
can be asked for the numbers behind a picture, and the trained window stands in each as a rule.

Charts of `longitude extend` as pictures that stand alone: on white, with a title and a key.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import altair as alt

from longitude.eval.records import CONTEXT
from longitude.eval.tables import ResultTable
from longitude.eval.tasks import metrics
from longitude.viz.extend_section import DAGGER, NOT_ASKED, Section
from longitude.viz.extend_theme import config
from longitude.viz.extend_vega import (
    CELL,
    CHOSEN,
    COUNT,
    ROWS,
    Chart,
    Rows,
    across,
    band,
    coloured,
    dashed,
    document,
    faint,
    interval,
    level_rule,
    losses,
    name_beside,
    tips,
    upward,
    window_rule,
)


def charts(section: Section) -> list[Chart]:
    """Every chart that the section has numbers for."""
    by_length = [name for name, m in metrics().items() if name == CONTEXT or m.selectable]
    return [
        *_by_position(section),
        *(
            c
            for m in by_length
            if m in section.boards
            for c in _by_length(section, section.boards[m])
        ),
        *_heatmaps(section),
        *_distances(section),
        *_cost(section),
    ]


def _by_position(section: Section) -> Iterable[Chart]:
    rows = [
        {"label": s, "first": a, "past": b, "x": math.sqrt((a + 1) * b), **interval(v)}
        for s in section.labels
        for a, b, v in section.curves.get(s, ())
    ]
    if rows:
        reading = metrics()["loss"].chart
        spec = _lines(section, rows, "position (tokens)", losses(rows))
        yield Chart("loss", "Loss by position", reading, spec, rows, "loss")


def _by_length(section: Section, board: ResultTable) -> Iterable[Chart]:
    rows = [
        {"label": s, "length": n, "x": n, **interval(cell.value)}
        for s in section.labels
        for n in board.lengths
        if (cell := board.cells.get((s, n))) and cell.value
    ]
    if not rows:
        return
    shares = board.metric.is_share
    axis = alt.Axis(format="%", tickCount=5)
    scale = alt.Scale(domain=[0, 1])
    if shares:
        y = alt.Y("mean:Q", title=board.unit, scale=scale, axis=axis)
    else:
        y = losses(rows) if board.measure == CONTEXT else upward(board.unit, "mean")
    x = (
        "tokens read before and with the scored ones"
        if board.measure == CONTEXT
        else "length (tokens)"
    )
    spec = _lines(section, rows, x, y, dots=True)
    yield Chart(board.measure, board.title, board.metric.chart, spec, rows, board.measure)


READING = {
    "grid": "Across: length in tokens; down: how deep in the text the number stands.",
    "distance": "The distance that the model is told, by true distance. Where its pairs, heads or "
    "layers are told different ones, a band lies between the least and the greatest. What stays "
    "under the level rule was seen in training.",
}


def _heatmaps(section: Section) -> Iterable[Chart]:
    for index, (label, cells) in enumerate(section.grids.items()):
        rows = [
            {
                **{"label": label, "length": n, "depth": depth, **interval(v)},
                "asked": not section.assumed("passkey", label, n),
            }
            for (n, depth), v in sorted(cells.items())
        ]
        reading = READING["grid"] + (f" {NOT_ASKED}" if section.any_assumed else "")
        spec = _heatmap(section, rows)
        yield Chart(f"grid-{index}", "Passkeys by depth", reading, spec, rows, "passkey", label)


def _heatmap(section: Section, rows: Rows) -> dict[str, Any]:
    look: dict[str, Any] = {"labelAngle": 0, "labelOverlap": True, "ticks": False, "domain": False}
    every = [*section.boards["passkey"].lengths]  # those too that were refused: they stay empty
    apart: dict[str, Any] = {"paddingInner": 0.05, "paddingOuter": 0}
    wide, down = alt.Scale(domain=every, **apart), alt.Scale(**apart)
    x = alt.X("length:O", title=None, axis=alt.Axis(labelExpr=COUNT, **look), scale=wide)
    y = alt.Y("depth:O", title=None, axis=alt.Axis(format=".0%", **look), scale=down)
    scale = alt.Scale(domain=[0, 1], range="heatmap", interpolate="rgb")
    tint = alt.Color("mean:Q", scale=scale, legend=None)
    data = alt.Chart(alt.NamedData(ROWS))
    layers: list[Any] = [data.mark_rect().encode(x, y, tint, tooltip=tips(rows))]
    if not all(r["asked"] for r in rows):
        left_out = data.transform_filter("!datum.asked").mark_text(fontSize=11, opacity=0.55)
        layers.append(left_out.encode(x, y, text=alt.value(DAGGER)))
    if min(every) <= section.subject.trained < max(every):
        inside = max(n for n in every if n <= section.subject.trained)
        edge = alt.Chart(alt.InlineData([{"length": inside}]))
        rule = edge.mark_rule(strokeWidth=1.5, xOffset=1)
        layers.append(rule.encode(alt.X("length:O", bandPosition=1)))
    return document(layers, rows, CELL * len({r["depth"] for r in rows}))


def _distances(section: Section) -> Iterable[Chart]:
    rows = [
        {"label": s, "x": x, "low": low, "high": high}
        for s in section.labels
        for x, low, high in section.maps.get(s, ())
    ]
    if not rows:
        return
    told, x = "believed distance (tokens)", across(rows, "true distance (tokens)", log=False)
    colour, dash, data = coloured(section), dashed(section), alt.Chart(alt.NamedData(ROWS))
    between = data.transform_filter("isValid(datum.high) && datum.high > datum.low").mark_area()
    # a layer without a row would have Vega warn of its scale
    spread = between.encode(x, upward(told, "high"), alt.Y2("low:Q"), colour, opacity=band(section))
    line = data.mark_line(strokeWidth=2)
    layers = [
        *window_rule(section, rows),
        level_rule(section),
        *([spread] if any((r["high"] or 0) > (r["low"] or 0) for r in rows) else []),
        *(
            line.encode(x, upward(told, end), colour, dash, opacity=faint(), tooltip=tips(rows))
            for end in ("high", "low")
        ),
    ]
    spec = document(layers, rows)
    yield Chart("distance", "Distance map", READING["distance"], spec, rows, "distance")


def _cost(section: Section) -> Iterable[Chart]:
    board, speed = section.main, section.boards.get("prefill")
    both = {*board.lengths} & {*speed.lengths} if board and speed else set()
    if board is None or speed is None or not both:
        return
    at = max(both)
    pairs = [(s, board.cells[s, at].value, speed.cells[s, at].value) for s in speed.labels]
    rows = [{"label": s, "x": fast.mean, **interval(v)} for s, v, fast in pairs if v and fast]
    if rows:
        way = "down" if board.lower_is_better else "up"
        reading = f"{board.title} against speed, at {at:,} tokens. Better is right and {way}."
        spec = _scatter(section, board, rows)
        yield Chart("cost", "Cost against quality", reading, spec, rows, "prefill")


def _scatter(section: Section, board: ResultTable, rows: Rows) -> dict[str, Any]:
    """A dot for each method with its name beside it; narrow pictures leave the names to the key."""
    axis = alt.Axis(labelExpr=COUNT, labelOverlap=True, tickCount=5, grid=False)
    scale = alt.Scale(zero=False, padding=24)
    x = alt.X("x:Q", title="prefill (tokens a second)", scale=scale, axis=axis)
    y = losses(rows) if board.lower_is_better else upward(board.unit, "mean")
    colour, data = coloured(section), alt.Chart(alt.NamedData(ROWS))
    ends = (alt.Y("low:Q"), alt.Y2("high:Q"))
    look: dict[str, Any] = {"fontSize": 11, "font": "ui-monospace, monospace", "limit": 170}
    layers = [
        data.mark_rule(strokeWidth=1.5).encode(x, *ends, colour, opacity=band(section)),
        data.mark_circle(size=90).encode(x, y, colour, opacity=faint(), tooltip=tips(rows)),
        *(
            data.transform_filter(alt.FieldOneOfPredicate("label", named))
            .mark_text(align=side, dx=10 if side == "left" else -10, dy=by, **look)
            .encode(x, y, text="label:N", opacity=name_beside())
            for (side, by), named in _beside(rows).items()
        ),
    ]
    return document(layers, rows)


def _beside(rows: Rows) -> dict[tuple[Any, int], list[str]]:
    """Where each dot's name stands (its side, and how far below), so that none covers another,
    where the dots lie in 540 by 210; from top to bottom."""
    xs, ys = [r["x"] for r in rows], [math.log(max(r["mean"], 1e-9)) for r in rows]
    taken: list[tuple[float, float, float]] = []  # left, right, height
    found: dict[tuple[Any, int], list[str]] = {}
    for r, x, y in sorted(zip(rows, _spread(xs, 540), _spread(ys, -210), strict=True), key=_height):
        wide, side = 6.7 * len(r["label"]) + 12, "left" if x <= 270 else "right"
        left = x if side == "left" else x - wide
        free = (
            by
            for by in (0, 13, -13, 26, -26, 39)
            if all(
                left > b or left + wide < a or abs(y + by - height) >= 12 for a, b, height in taken
            )
        )
        by = next(free, 0)
        taken.append((left, left + wide, y + by))
        found.setdefault((side, by), []).append(r["label"])
    return found


def _spread(values: list[float], size: float) -> Iterator[float]:
    low, high = min(values), max(values)
    return (size * (v - low) / ((high - low) or 1) for v in values)


def _height(one: tuple[Any, float, float]) -> float:
    return one[2]


def _lines(
    section: Section, rows: Rows, title: str, y: alt.Y, dots: bool = False
) -> dict[str, Any]:
    """A line for each method with its interval as a band; the trained window as a rule."""
    data, x = alt.Chart(alt.NamedData(ROWS)), across(rows, title)
    colour, dash = coloured(section), dashed(section)
    ends = (alt.Y("low:Q"), alt.Y2("high:Q"))
    layers = [
        *window_rule(section, rows),
        data.mark_area().encode(x, *ends, colour, opacity=band(section)),
        data.mark_line(strokeWidth=2.2, strokeCap="round", strokeJoin="round").encode(
            x, y, colour, dash, opacity=faint()
        ),
        data.mark_circle(size=46 if dots else 14).encode(
            x, y, colour, opacity=faint(), tooltip=tips(rows)
        ),
    ]
    return document(layers, rows)


WIDTH, SMALL = 620, 200
KEY: dict[str, Any] = {"title": None, "orient": "bottom", "columns": 3, "labelLimit": 260}
KEY |= {"symbolType": "stroke", "symbolOpacity": 1, "symbolStrokeWidth": 2.5, "symbolSize": 260}


def standing(section: Section, group: Sequence[Chart]) -> dict[str, Any]:
    """One chart, or several small ones, as a document of their own."""
    look = {**config(len(section.labels)), "background": "white", "padding": 20}
    note = [NOT_ASKED] if any(r.get("asked") is False for c in group for r in c.rows) else []
    head = {"text": group[0].title, "subtitle": [section.title, *note], "offset": 18}
    if group[0].label is None:
        body = _keyed({**copy.deepcopy(group[0].spec), "width": WIDTH})
    else:
        body = _multiples(group)
    return {**body, "title": head, "config": look}


def _keyed(spec: dict[str, Any]) -> dict[str, Any]:
    """With a key to colours and dashes: a page has its own."""
    for layer in spec["layer"]:  # all of them: one that wants none would take it from the rest
        for kind in ("color", "strokeDash"):
            if kind in layer["encoding"]:
                layer["encoding"][kind]["legend"] = KEY
    return spec


def _multiples(group: Sequence[Chart]) -> dict[str, Any]:
    """Small charts beside each other, each with rows of its own."""
    small, rows = [], {}
    for chart in group:
        spec = copy.deepcopy(chart.spec)
        inner = {"title": {"text": chart.label, "fontSize": 12}, "width": SMALL}
        for layer in [spec, *spec["layer"]]:
            if layer.get("data", {}).get("name") == ROWS:
                layer["data"] = {"name": chart.name}
        rows |= {n: r for n, r in spec["datasets"].items() if n != ROWS} | {chart.name: chart.rows}
        small.append({k: v for k, v in spec.items() if k in ("layer", "data", "height")} | inner)
    return {"concat": small, "columns": 3, "params": [CHOSEN], "datasets": rows}
