"""Charts of `longitude extend` as pictures that stand alone: on white, with a title and a key."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from longitude.report.extending.look import config
from longitude.report.extending.marks import CHOSEN, ROWS, Chart
from longitude.report.extending.section import NOT_ASKED, Section

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
