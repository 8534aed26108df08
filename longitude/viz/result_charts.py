"""The charts of results: of `longitude extend` and `tune` by method, of `longitude lab` by scheme.

Curves carry their interval as a band and the trained window as a dashed rule. On a page, the method
under the pointer stands out (the parameter `chosen`); standalone files have a legend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from longitude.eval.records import ANSWER_LOSS, CONTEXT, KEPT, LOSS, RETRIEVAL
from longitude.eval.tasks import families, metrics
from longitude.viz import vega as v
from longitude.viz.vega import Chart, Rows, Spec

if TYPE_CHECKING:
    from longitude.eval.tables import ResultTable
    from longitude.viz.section import Section

NARROW = 420  # pixels: narrower charts have no room for names
PERCENT = "format(datum.value, '.0%')"
STEPS = (1, 1.5, 2, 3, 4, 5, 6, 8)  # ticks of a log axis, times powers of ten
INSANE = "†: its loss is over half a nat above the baseline's in its window: a share means nothing."
ANSWERS = "Across: length in tokens; down: families of questions; the darker, the more are right."
DISTANCES = (
    "The distance that attention computes with, by true distance. A band lies between minimum and "
    "maximum where rotary pairs, heads or layers differ. What stays below the horizontal rule was "
    "seen in training."
)


def extend_charts(section: Section) -> list[Chart]:
    """Every chart for which a model's measurements have numbers."""
    others = [n for n, m in metrics().items() if m.selectable and n != KEPT]

    def by_length(*names: str) -> list[Chart]:
        tables = [section.tables[name] for name in names if name in section.tables]
        return [chart for table in tables for chart in _by_length(section, table)]

    return [
        *by_length(KEPT),
        *_answers(section),
        *by_length(ANSWER_LOSS),
        *_loss_by_position(section),
        *by_length(CONTEXT, *others),
        *_distance_map(section),
        *_cost(section),
    ]


def _loss_by_position(section: Section) -> Iterator[Chart]:
    rows = [
        {"label": s, "first": a, "past": b, "x": math.sqrt((a + 1) * b), **vars(value)}
        for s in section.labels
        for a, b, value in section.curves.get(s, ())
    ]
    if rows:
        x = v.axis("x", "position (tokens)", "log2", **length_ticks(rows))
        layers = lines(rows, section.labels, section.subject.trained, x, loss_axis(rows))
        spec = v.document(layers, rows, 300)
        yield Chart(LOSS, "Loss by position", metrics()[LOSS].chart, spec, rows, LOSS)


def _by_length(section: Section, table: ResultTable) -> Iterator[Chart]:
    metric = table.metric
    rows = [
        {"label": s, "length": n, "x": n, **vars(cell.value)}
        for s in section.labels
        for n in table.lengths
        if (cell := table.cells.get((s, n))) and cell.value
        if metric.name != KEPT or (s, n) not in section.insane
    ]
    if not rows:
        return
    title, y, rules = "length (tokens)", v.axis("mean", metric.unit), []
    if metric.name == CONTEXT:
        title, y = "context (tokens, the scored ones included)", loss_axis(rows)
    elif metric.name == KEPT:
        y = v.axis("mean", "share kept", labelExpr=PERCENT)
        base = table.cells.get((table.labels[0], table.trained))
        rules = [v.layer("rule", [{"mean": base.value.mean}], y=y)] if base and base.value else []
    elif metric.is_share:
        y = v.axis("mean", metric.unit, ends={"domain": [0, 1]}, labelExpr=PERCENT)
    x = v.axis("x", title, "log2", **length_ticks(rows))
    layers = [*lines(rows, section.labels, section.subject.trained, x, y, size=46), *rules]
    spec = v.document(layers, rows, 300)
    yield Chart(metric.name, metric.title, metric.chart, spec, rows, metric.name)


def _answers(section: Section) -> Iterator[Chart]:
    """A heat map for each method: families of questions by length."""
    for index, (label, cells) in enumerate(section.answers.items()):
        rows = [
            {"label": label, "length": n, "family": families()[name].title, **vars(value)}
            for (name, n), value in cells.items()
            if name in families()
        ]
        if not rows:
            continue
        lengths, trained = section.tables[RETRIEVAL].lengths, section.subject.trained
        spec = heat_map(rows, "family", lengths, 22)
        if min(lengths) <= trained < max(lengths):
            inside = [{"length": max(n for n in lengths if n <= trained)}]
            edge = v.mark("rule", strokeDash=[1, 0], strokeWidth=1.5, xOffset=1)
            x = spec["layer"][0]["encoding"]["x"]
            spec["layer"] += [v.layer(edge, inside, x={**x, "bandPosition": 1})]
        title = "Questions answered exactly"
        yield Chart(f"answers-{index}", title, ANSWERS, spec, rows, RETRIEVAL, label)


def heat_map(rows: Rows, down: str, lengths: Sequence[int], height: int) -> Spec:
    """Heat map of shares, by length across and the field `down` in rows of `height` pixels."""
    look: Spec = {"labelAngle": 0, "labelOverlap": True, "ticks": False, "domain": False}
    band: Spec = {"paddingInner": 0.05, "paddingOuter": 0}
    order = [*dict.fromkeys(row[down] for row in rows)]
    x = v.channel("length:O", title=None, axis={"labelExpr": v.COUNT, **look})
    x["scale"] = {"domain": [*lengths], **band}  # lengths without a number stay empty
    y = v.channel(f"{down}:N", title=None, axis=look, scale=band, sort=order)
    scale = {"domain": [0, 1], "range": "heatmap", "interpolate": "rgb"}
    shade = v.channel("mean:Q", scale=scale, legend=None)
    cells = v.layer("rect", x=x, y=y, color=shade, tooltip=_tips(rows))
    return v.document([cells], rows, height * len(order))


def _distance_map(section: Section) -> Iterator[Chart]:
    labels, at = section.labels, section.subject.trained
    rows = [
        {"label": s, "x": x, "low": low, "high": high}
        for s in labels
        for x, low, high in section.maps.get(s, ())
    ]
    if not rows:
        return
    x = v.axis("x", "true distance (tokens)", labelExpr=v.COUNT, grid=False)
    y = v.axis("high", "effective distance (tokens)", ends={"nice": True}, labelExpr=v.COUNT)
    is_band = "isValid(datum.high) && datum.high > datum.low"
    between: Spec = {"x": x, "y": y, "y2": {"field": "low"}, "opacity": _shade(labels)}
    area = v.layer("area", where=is_band, **between, color=colour(labels))
    look: Spec = {"x": x, "color": colour(labels), "strokeDash": dash(labels)}
    look |= {"opacity": v.STRENGTH, "tooltip": _tips(rows)}
    layers = [
        *v.level(f"trained window {at:,}", at, [r["x"] for r in rows], "x"),
        v.layer("rule", [{"high": at}], y=y),
        *([area] if any((r["high"] or 0) > (r["low"] or 0) for r in rows) else []),
        v.layer("line", y=y, **look),
        v.layer("line", y={**y, "field": "low"}, **look),
    ]
    spec = v.document(layers, rows, 300)
    yield Chart("distance", "Distance map", DISTANCES, spec, rows, "distance")


def _cost(section: Section) -> Iterator[Chart]:
    """Quality against prefill speed: a dot for each method with its name beside it."""
    table, speed, labels = section.main, section.tables.get("prefill"), section.labels
    at = max({*table.lengths} & {*speed.lengths}, default=0) if table and speed else 0
    if not table or not speed or not at:
        return
    usable = [s for s in speed.labels if table.metric.name != KEPT or (s, at) not in section.insane]
    shared = [s for s in usable if (s, at) in table.cells and (s, at) in speed.cells]
    pairs = [(s, table.cells[s, at].value, speed.cells[s, at].value) for s in shared]
    rows = [{"label": s, "x": x.mean, **vars(value)} for s, value, x in pairs if value and x]
    if not rows:
        return
    better = "down" if table.metric.lower_is_better else "up"
    reading = f"{table.metric.title} against speed, at {at:,} tokens. Better is right and {better}."
    ends: Spec = {"zero": False, "padding": 24}
    x = v.axis("x", "prefill (tokens/s)", ends=ends, labelExpr=v.COUNT, tickCount=5, grid=False)
    y = loss_axis(rows) if table.metric.lower_is_better else v.axis("mean", table.metric.unit)
    bar = v.mark("rule", strokeDash=[1, 0], strokeWidth=1.5)
    interval: Spec = {"x": x, "y": "low:Q", "y2": {"field": "high"}, "opacity": _shade(labels)}
    dot: Spec = {"x": x, "y": y, "opacity": v.STRENGTH, "tooltip": _tips(rows)}
    visible = {"test": f"width > {NARROW} && ({v.POINTED})", "value": 1}
    name: Spec = {"x": x, "y": y, "text": "label:N", "opacity": {"condition": visible, "value": 0}}
    layers = [
        v.layer(bar, **interval, color=colour(labels)),
        {"name": "dots", **v.layer(v.mark("circle", size=90), **dot, color=colour(labels))},
    ]
    for (side, below), named in place_names(rows).items():
        text = v.mark("text", align=side, dx=10 if side == "left" else -10, dy=below, font=v.MONO)
        layers.append(v.layer(text, where=f"indexof({named}, datum.label) >= 0", **name))
    spec = v.document(layers, rows, 300)
    yield Chart("cost", "Cost against quality", reading, spec, rows, "prefill")


def place_names(rows: Rows) -> dict[tuple[str, int], list[str]]:
    """Choose the alignment and vertical offset of each dot's name so that no names overlap, with
    the dots spread over 540 by 210 pixels. Returns the labels by (alignment, offset)."""
    xs, ys = [r["x"] for r in rows], [-math.log(max(r["mean"], 1e-9)) for r in rows]
    x_span, y_span = max(xs) - min(xs) or 1, max(ys) - min(ys) or 1
    taken: list[tuple[float, float, float]] = []  # left, right, height
    places: dict[tuple[str, int], list[str]] = {}
    for r, dot, height in sorted(zip(rows, xs, ys, strict=True), key=lambda dot: dot[2]):
        x, y = 540 * (dot - min(xs)) / x_span, 210 * (height - min(ys)) / y_span
        width, side = 6.7 * len(r["label"]) + 12, "left" if x <= 270 else "right"
        left = x if side == "left" else x - width
        free = (
            offset
            for offset in (0, 13, -13, 26, -26, 39)
            if all(left > b or left + width < a or abs(y + offset - h) >= 12 for a, b, h in taken)
        )
        offset = next(free, 0)
        taken.append((left, left + width, y + offset))
        places.setdefault((side, offset), []).append(r["label"])
    return places


def standalone(section: Section, group: Sequence[Chart]) -> Spec:
    """A standalone document of one chart or several small ones: on white, with title and legend."""
    head = {"text": group[0].title, "subtitle": [section.title], "offset": 18}
    look = v.method_themes(len(section.labels))["light"] | {"background": "white", "padding": 20}
    if group[0].label is None:
        body = {**v.keyed(group[0].spec), "width": 620}
    else:
        titles = [{"title": {"text": c.label, "fontSize": 12}, "width": 200} for c in group]
        small = [v.inset(c.spec, c.rows, **title) for c, title in zip(group, titles, strict=True)]
        body = {"concat": small, "columns": 3, "params": [v.CHOSEN]}
    return {**body, "title": head, "config": look}


def lines(
    rows: Rows,
    labels: Sequence[str],
    trained: int,
    x: Spec,
    y: Spec,
    *,
    first: int = 0,
    size: int = 14,
    shade: float | None = None,
) -> list[Spec]:
    """A line for each method with its interval as a band, and the trained window as a rule."""
    look: Spec = {"x": x, "y": y, "color": colour(labels), "opacity": v.STRENGTH}
    area: Spec = {"x": x, "y": "low:Q", "y2": {"field": "high"}, "color": colour(labels)}
    area["opacity"] = _shade(labels, shade)
    bands = [v.layer("area", where="datum.low < datum.high", **area)]
    return [
        *v.level(f"trained window {trained:,}", trained, [r["x"] for r in rows], "x"),
        *(bands if any(r["low"] < r["high"] for r in rows) else []),  # Vega warns of an empty layer
        v.layer("line", **look, strokeDash=dash(labels, first)),
        v.layer(v.mark("circle", size=size), **look, tooltip=_tips(rows)),
    ]


def loss_axis(rows: Rows, title: str = "loss (nats per token)") -> Spec:
    """A loss axis: logarithmic if losses are positive and differ by more than a factor of two. The
    means decide its range, since the interval of few documents may dwarf everything else."""
    means = [r["mean"] for r in rows]
    low = max(min(r["low"] for r in rows), 0.85 * min(means))
    high = min(max(r["high"] for r in rows), 1.25 * max(means))
    look: Spec = {"labelExpr": "format(datum.value, '.3~g')", "tickCount": 5}
    if not (low > 0 and high > 2 * low):
        ends: Spec = {"zero": False, "domain": [low, high], "clamp": True}
        return v.axis("mean", title, ends=ends, **look)
    low, high = low / 1.05, high * 1.05
    ticks = [t for e in range(-4, 5) for s in STEPS if low <= (t := s * 10.0**e) <= high]
    ends = {"domain": [low, high], "clamp": True}
    return v.axis("mean", title, "log", ends=ends, **look | {"values": ticks})


def length_ticks(rows: Rows, ticks: Sequence[int] = ()) -> Spec:
    lengths = sorted(ticks or {r["length"] for r in rows if "length" in r})
    look: Spec = {"labelExpr": v.COUNT, "grid": False, "ends": {"padding": 12}}
    return look | {"values": lengths} if lengths else look | {"values": None, "tickCount": 6}


def colour(labels: Sequence[str]) -> Spec:
    return v.channel("label:N", scale={"domain": [*labels]}, legend=None)


def dash(labels: Sequence[str], first: int = 0) -> Spec:
    strokes = v.dashes(range(first, first + len(labels)))
    return v.channel("label:N", scale={"domain": [*labels], "range": strokes}, legend=None)


def _shade(labels: Sequence[str], shade: float | None = None) -> Spec:
    """Opacity of intervals: shown for up to three methods, else only for the method pointed at."""
    usual = shade if shade is not None else 0.14 if len(labels) <= 3 else 0
    chosen = {"test": "chosen == datum.label", "value": 0.22}
    return {"condition": [chosen, {"test": "!chosen", "value": usual}], "value": 0}


def _tips(rows: Rows) -> list[Spec]:
    names = [n for n in rows[0] if not (n == "x" and "length" in rows[0])]
    return v.tooltip(*(f"{n}:{'N' if isinstance(rows[0][n], str) else 'Q'}" for n in names))
