"""Rows as tables and charts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.suites import chart, show
from benchmarks.suites.rows import BASELINE, OURS, PEER, Row, Work
from longitude import UserError

WORK = Work(
    "attention", "T5's bias", "1 × 16 heads × 8,192", 8192, "plain (cuDNN)", {"device": "H"}
)
ROWS = [
    Row(WORK, "plain (cuDNN)", BASELINE, 0, 1.0, 1.0, 554e12, "FLOP/s", 2e-3, 1.0, 2**30, 1.0),
    Row(WORK, "longitude", OURS, 1, 1.25, 0.8, 443e12, "FLOP/s", 2.2e-3, 1.1, 2**31, 2.0,
        {"speed": 0.8}),
    Row(WORK, "Flex", PEER, 2, 3.0, 0.333, 185e12, "FLOP/s", 2e-3, 1.0, 2**30, 1.0),
    Row(WORK, "Liger", PEER, 3, refused="not installed"),
]  # fmt: skip


def printed(rows: list[Row]) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    show.show(rows, console)
    return console.export_text()


def test_the_table_says_all_there_is() -> None:
    text = printed(ROWS)
    assert "T5's bias  1 × 16 heads × 8,192" in text
    line = next(one for one in text.splitlines() if one.startswith("longitude"))
    cells = ["1.25", "0.80", "443 TFLOP/s", "2.2e-03 (1.10×)", "2.00 GiB (2.00×)", "≥ 0.80 reached"]
    assert all(cell in line for cell in cells)
    assert "Liger: not installed" in text and "1 of 1 reach their goals" in text


def test_a_speed_has_its_range() -> None:
    assert "0.80 (0.75–0.90)" in printed([ROWS[0], replace(ROWS[1], least=0.75, most=0.9)])


def test_what_is_missed_is_named() -> None:
    slow = replace(ROWS[1], speed=0.5)
    wrong = "  T5's bias, 1 × 16 heads × 8,192: speed 0.5, not ≥ 0.8"
    assert wrong in printed([ROWS[0], slow]) and "missed" in printed([slow])
    short = replace(ROWS[1], ms=0.02, goal={"ms": 0.016})
    text = printed([ROWS[0], short])
    assert "ms 0.02, not ≤ 0.016" in text and "≤ 0.016 ms missed" in text


def test_columns_without_a_word_are_left_out() -> None:
    bare = [Row(WORK, "longitude", OURS, 0, 1.0, 1.0)]
    text = printed(bare)
    assert "speed" in text and not any(head in text for head in ("memory", "goal", "error"))


def test_markdown_has_a_table_for_each_machine_and_suite() -> None:
    there = [replace(r, work=replace(WORK, machine={"device": "K", "torch": "2"})) for r in ROWS]
    text = show.markdown([*ROWS, *there])
    assert text.count("### H\n") == 1 and "### K, torch 2\n" in text
    assert text.count("#### attention\n") == 2
    assert "| **longitude** | 1.25 | 0.80 | 443 TFLOP/s |" in text
    assert "| Liger: not installed | – |" in text


def test_the_chart_has_every_way_that_was_timed(tmp_path: Path) -> None:
    spec = chart.spec(ROWS, "Speeds")
    drawn = [row for c in spec["vconcat"] for row in c["data"]["values"]]
    assert {(row["way"], row["speed"]) for row in drawn} == {("longitude", 0.8), ("Flex", 0.333)}
    chart.write(ROWS, tmp_path / "c.svg", "Speeds")
    text = (tmp_path / "c.svg").read_text(encoding="utf-8")
    assert "T5's bias · 8,192" in text and "Speeds" in text
    assert json.loads(json.dumps(spec)) == spec


def test_several_of_ours_have_a_line_each() -> None:
    both = [*ROWS, replace(ROWS[1], way="longitude, cached")]
    named = {row["way"]: row["case"] for row in chart._drawn(both)}
    assert named["longitude"] != named["longitude, cached"] and named["Flex"] == named["longitude"]


def test_nothing_to_draw_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No speeds to draw"):
        chart.write(ROWS[3:], tmp_path / "c.svg", "Speeds")
