"""The numbers behind each chart of `longitude extend`, as tables."""

from __future__ import annotations

from typing import Any

from longitude.eval.compare import Board, Interval
from longitude.report.extending.marks import Chart
from longitude.report.extending.section import COSTS, DAGGER, SHARES, Section, printed


def tables(s: Section, chart: Chart) -> list[dict[str, Any]]:
    """A chart's numbers as tables."""
    if chart.label is not None:
        return [_grid_table(s)]
    if chart.measure == "distance":
        return [_map_table(chart)]
    if chart.name == "loss":
        return [_bins_table(s), _board_table(s, s.boards["loss"])]
    names = [m for m in COSTS if m in s.boards] if chart.name == "cost" else [chart.measure]
    return [_board_table(s, s.boards[name]) for name in names]


def _board_table(s: Section, board: Board) -> dict[str, Any]:
    heads = [f"{n:,}{' (trained)' if n == board.trained else ''}" for n in board.lengths]
    rows = [[label, *(s.cell(board, label, n) for n in board.lengths)] for label in board.labels]
    unit = "" if board.measure in (*SHARES, "memory") else f" ({board.unit})"
    return {"title": f"{board.title} by length{unit}", "heads": ["method", *heads], "rows": rows}


def _bins_table(s: Section) -> dict[str, Any]:
    bins = sorted({(a, b) for path in s.curves.values() for a, b, _ in path})
    found = {(s, a, b): v for s, path in s.curves.items() for a, b, v in path}
    heads = [f"{a + 1:,}–{b:,}" if b > a + 1 else f"{b:,}" for a, b in bins]
    rows = [
        [
            label,
            *(printed("loss", v.mean) if (v := found.get((label, *ends))) else "" for ends in bins),
        ]
        for label in s.curves
    ]
    title = "Loss by position, in bins (nats a token)"
    return {"title": title, "heads": ["method", *heads], "rows": rows}


def _grid_table(s: Section) -> dict[str, Any]:
    lengths = s.boards["passkey"].lengths
    rows = [
        [label, f"{depth:.0%}", *(_share(s, label, n, cells.get((n, depth))) for n in lengths)]
        for label, cells in s.grids.items()
        for depth in sorted({depth for _, depth in cells})
    ]
    heads = ["method", "depth", *(f"{n:,}" for n in lengths)]
    return {"title": "Passkeys by length and depth", "heads": heads, "rows": rows}


def _share(s: Section, label: str, length: int, value: Interval | None) -> str:
    sign = DAGGER if s.assumed("passkey", label, length) else ""
    return f"{value.mean:.0%} of {value.n}{sign}" if value else ""


def _map_table(chart: Chart) -> dict[str, Any]:
    named = [*dict.fromkeys(r["label"] for r in chart.rows)]
    found = {(r["label"], r["x"]): (r["low"], r["high"]) for r in chart.rows}
    rows = [
        [f"{x:,}", *(_ends(found.get((label, x))) for label in named)]
        for x in sorted({r["x"] for r in chart.rows})
    ]
    return {"title": "Believed distances", "heads": ["true distance", *named], "rows": rows}


def _ends(ends: tuple[float | None, float | None] | None) -> str:
    if ends is None:
        return ""
    low, high = (None if end is None else f"{end:,.5g}" for end in ends)
    return "hidden" if high is None else high if low == high else f"{low} – {high}"
