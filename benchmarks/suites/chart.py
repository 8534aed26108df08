"""Draw rows as one chart per suite: a line for each case, a dot at the speed of each method.

1 is the baseline's speed; a tick marks the goal. The axis of speeds is logarithmic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suites.rows import OURS, PEER, SUITES, Row
from longitude.core.validate import UserError
from longitude.viz import vega as v
from longitude.viz.files import check_kind, write_spec

WIDTH, ROW = 560, 20
KINDS = (OURS, PEER)
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]


def write(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw rows into a file: .html, .png or .svg."""
    check_kind(path)
    if not any(_drawn(rows)):
        raise UserError(f"No speeds to draw into {path}: measure first.")
    write_spec(spec(rows, title), title, path)


def spec(rows: Sequence[Row], title: str) -> dict[str, Any]:
    """Return a Vega-Lite document with the charts of all suites, one below the other."""
    charts = [
        _chart(suite, drawn)
        for suite in SUITES
        if (drawn := _drawn([r for r in rows if r.work.suite == suite]))
    ]
    head = {"text": title, "fontSize": 18, "offset": 20}
    return {"title": head, "params": [v.CHOSEN], "vconcat": charts, "spacing": 36}


def _drawn(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the fields to draw of each method that was timed and is not a baseline."""
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
    """Return the batch size for a label if it is above 1; `sizes` begins with it."""
    batch = row.work.sizes.split(" × ")[0]
    return f" · {batch} sequences" if batch.isdigit() and batch != "1" else ""


def _which(row: Row, rows: Sequence[Row]) -> str:
    """Name our method if its case has several; peers join the line of the first."""
    several = [r.way for r in rows if r.work == row.work and r.kind == OURS]
    way = row.way if row.kind == OURS else several[0] if several else ""
    return f" · {way.removeprefix('longitude, ')}" if len(several) > 1 else ""


def _chart(suite: str, rows: list[dict[str, Any]]) -> v.Spec:
    order = [*dict.fromkeys(r["case"] for r in rows)]
    speeds = [r["speed"] for r in rows] + [r["goal"] for r in rows if r["goal"]]
    low, high = min(*speeds, 0.5) / 1.1, max(*speeds, 1.2) * 1.1
    ticks = {"values": [t for t in TICKS if low <= t <= high], "labelExpr": "datum.label"}
    x = v.axis("speed", "speed, × baseline", "log", ends={"domain": [low, high]}, **ticks)
    lines = {"labelLimit": 340, "domain": False, "ticks": False, "grid": True}
    y = v.channel("case:N", sort=order, title=None, axis=lines)
    used = [kind for kind in KINDS if any(r["kind"] == kind for r in rows)]
    legend = {"title": None, "orient": "top", "symbolOpacity": 1}
    colour = v.channel("kind:N", scale={"domain": used}, legend=legend)
    tips = v.tooltip("case:N", "way:N", "speed:Q", "ms:Q", "error:Q", "goal:Q", "baseline:N")
    goal = v.mark("tick", style="worse", thickness=2.5, size=ROW - 4)
    layers = [
        v.layer("rule", [{"speed": 1.0}], x=x),
        v.layer(goal, where="isValid(datum.goal)", x={**x, "field": "goal"}, y=y),
        v.layer(v.mark("circle", size=70), x=x, y=y, color=colour, tooltip=tips),
    ]
    head = {"text": suite, "fontSize": 14, "offset": 10}
    size = {"width": WIDTH, "height": ROW * len(order), "title": head}
    return v.inset(v.document(layers), rows, **size)
