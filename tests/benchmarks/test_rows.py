"""Rows: kept, carried to another machine, read again, and judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suites.rows import (
    BASELINE,
    OURS,
    Row,
    Work,
    cases,
    load,
    plain,
    recorded,
    store_rows,
)
from longitude import UserError
from longitude.core.store import Store

WORK = Work("attention", "RoPE", "1 × 4 heads", 64, "plain (flash)", {"device": "a card"})
OWN = Row(WORK, "longitude", OURS, 1, ms=2.0, speed=0.9, error=1e-3, goal={"speed": 0.8})
BASE = Row(WORK, "plain (flash)", BASELINE, 0, ms=1.8, speed=1.0)


def file(rows: list[Row], path: Path) -> Path:
    with Store(":memory:") as store:
        store_rows(store, rows)
        store.export(path)
    return path


def loaded(paths: list[Path]) -> list[Row]:
    with Store(":memory:") as store:
        found = load(store, paths)
    assert all(row.made.startswith("20") for row in found)
    return [replace(row, made="") for row in found]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    later = replace(OWN, order=5, work=replace(WORK, suite="rope"))
    lost = Row(WORK, "a peer", "peer", 2, refused="not installed")
    assert loaded([file([later, OWN, lost, BASE], tmp_path / "r.jsonl")]) == [
        later,  # turning comes first, then as measured
        BASE,
        OWN,
        lost,
    ]


def test_a_later_run_replaces_the_same_work_though_another_kernel_was_fastest() -> None:
    other = replace(WORK, baseline="plain (cuDNN)")
    with Store(":memory:") as store:
        store_rows(store, [BASE, OWN])
        store_rows(
            store, [replace(BASE, work=other, way="plain (cuDNN)"), replace(OWN, work=other)]
        )
        found = recorded(store)
    assert [(r.way, r.work.baseline) for r in found] == [
        ("plain (cuDNN)", "plain (cuDNN)"),
        ("longitude", "plain (cuDNN)"),
    ]


def test_machines_stay_apart(tmp_path: Path) -> None:
    there = replace(OWN, work=replace(WORK, machine={"device": "another"}))
    files = [file([OWN], tmp_path / "a.jsonl"), file([there], tmp_path / "b.jsonl")]
    found = loaded(files)
    assert [r.work.machine["device"] for r in found] == ["a card", "another"]
    assert len(cases(found)) == 2


def test_no_rows_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No benchmark rows"):
        loaded([file([], tmp_path / "none.jsonl")])
    (tmp_path / "old.jsonl").write_text(
        '{"key": {"kind": "bench", "way": "x", "colour": 1}, "value": {}, '
        '"made": "2026-01-31T12:00:00+00:00"}\n'
    )
    with pytest.raises(UserError, match="recorded by another version"):
        loaded([tmp_path / "old.jsonl"])


@pytest.mark.parametrize(
    ("goal", "ms", "speed", "reached"),
    [
        ({"speed": 0.8}, 2.0, 0.8, True),
        ({"speed": 0.8}, 2.0, 0.79, False),
        ({"ms": 0.016}, 0.016, 0.1, True),
        ({"ms": 0.016}, 0.017, 9.0, False),
        ({}, 1.0, 1.0, None),
        ({"speed": 0.8}, None, None, None),
        ({"speed": 0.8}, 2.0, None, False),
        ({"error": 1.2, "memory": 1.3}, 2.0, 0.1, True),
        ({"error": 1.19}, 2.0, 0.1, False),
        ({"memory": 1.2}, 2.0, 0.1, False),
    ],
)
def test_a_goal_is_reached_or_not(goal, ms, speed, reached) -> None:
    row = replace(OWN, goal=goal, ms=ms, speed=speed, error_ratio=1.2, peak_ratio=1.3)
    assert row.reached is reached and plain(row)["reached"] is reached
    assert plain(row)["suite"] == "attention" and plain(row)["way"] == "longitude"


def test_what_is_missed_is_told() -> None:
    asked = {"speed": 0.8, "error": 1.4, "memory": 1.3, "ms": 1.5}
    row = replace(OWN, goal=asked, speed=0.5, error_ratio=2.0)
    assert [*row.missed().values()] == [
        "speed 0.5, not ≥ 0.8",
        "ms 2, not ≤ 1.5",
        "error 2, not ≤ 1.4",
    ]
