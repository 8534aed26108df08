"""Rows as one chart a suite: a line for each case, a dot for each way, at its speed.

1 is the baseline's speed; a tick marks what should be reached. Speeds are laid out in equal ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from benchmarks.suites.rows import OURS, PEER, SUITES, Row
from longitude.core.validate import UserError
from longitude.viz.figures import BLUE, GREY, INK, ORANGE, VERMILION, Put, document, inner
from longitude.viz.files import check_kind, write_spec

WIDTH, ROW = 560, 20
KINDS = {OURS: BLUE, PEER: ORANGE}
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]


def write(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw rows into a file: .html, .png or .svg."""
    check_kind(path)
    if not any(_drawn(rows)):
        raise UserError(f"There is no speed to draw into {path}: measure some ways first.")
    write_spec(spec(rows, title), title, path)


def spec(rows: Sequence[Row], title: str) -> dict[str, Any]:
    """Every suite, one under the other, as a Vega-Lite document."""

    def body(put: Put) -> dict[str, Any]:
        charts = [
            inner(_chart(suite, found, put))
            for suite in SUITES
            if (found := _drawn([r for r in rows if r.work.suite == suite]))
        ]
        head = {"text": title, "fontSize": 18, "offset": 20}
        return {"title": head, "vconcat": charts, "spacing": 36}

    return document(body)


def _drawn(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What is drawn of each way that was timed and is no baseline."""
    return [
        {
            "case": f"{r.work.name} · {r.work.tokens:,}{_more(r)}{_which(r, rows)}",
            "way": r.way,
            "kind": r.kind,
            "speed": r.speed,
            "ms": r.ms,
            "error": r.error,
            "goal": r.goal.get("speed"),
            "baseline": r.work.baseline,
        }
        for r in rows
        if r.speed and r.kind in KINDS
    ]


def _more(row: Row) -> str:
    """Sequences, where there are several: the sizes begin with them."""
    batch = row.work.sizes.split(" × ")[0]
    return f" · {batch} sequences" if batch.isdigit() and batch != "1" else ""


def _which(row: Row, rows: Sequence[Row]) -> str:
    """Which of ours it is, where a case has several."""
    several = [r.way for r in rows if r.work == row.work and r.kind == OURS]
    way = row.way if row.kind == OURS else several[0] if several else ""
    return f" · {way.removeprefix('longitude, ')}" if len(several) > 1 else ""


def _chart(suite: str, rows: list[dict[str, Any]], put: Put) -> Any:
    order = [*dict.fromkeys(r["case"] for r in rows)]
    speeds = [r["speed"] for r in rows] + [r["goal"] for r in rows if r["goal"]]
    ends = [min(*speeds, 0.5) / 1.1, max(*speeds, 1.2) * 1.1]
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(values=[t for t in TICKS if ends[0] <= t <= ends[1]], format="~g")
    x = alt.X("speed:Q", title="speed, of the baseline's", scale=scale, axis=axis)
    look = alt.Axis(labelLimit=340, domain=False, ticks=False, grid=True)
    y = alt.Y("case:N", sort=order, title=None, axis=look)
    used = [k for k in KINDS if any(r["kind"] == k for r in rows)]
    colours = alt.Scale(domain=used, range=[KINDS[k] for k in used])
    legend = alt.Legend(title=None, orient="top", symbolOpacity=1)
    tips = ["case:N", "way:N", "speed:Q", "ms:Q", "error:Q", "goal:Q", "baseline:N"]
    data, goals = put(rows), put(r for r in rows if r["goal"])
    tick = alt.Chart(goals).mark_tick(color=VERMILION, thickness=2.5, size=ROW - 4)
    layers = [
        alt.Chart(put([{"speed": 1.0}])).mark_rule(color=GREY, strokeDash=[4, 3]).encode(x),
        tick.encode(alt.X("goal:Q", scale=scale), y),
        alt.Chart(data)
        .mark_circle(size=70, opacity=0.9)
        .encode(x, y, alt.Color("kind:N", scale=colours, legend=legend), tooltip=tips),
    ]
    named = alt.TitleParams(suite, color=INK, fontSize=14, offset=10)
    return alt.layer(*layers).properties(width=WIDTH, height=ROW * len(order), title=named)
