"""`longitude bench`: measured, written, and shown again where nothing heavy is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Ran, python

SMALL = ("bench", "--suite", "rope", "--device", "cpu", "--tokens", "32", "--rounds", "1")
BARE = """
import sys
for name in ("torch", "altair", "vl_convert"):
    sys.modules[name] = None
from longitude.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from longitude.cli.main import run

    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    assert run([*SMALL, "--out", str(path)]) == 0
    return path


def test_rows_are_lines_of_json_as_they_come(longitude: Callable[..., Ran]) -> None:
    code, out, err = longitude(*SMALL, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(found) == 10
    assert {row["way"] for row in found if row["kind"] == "longitude"} == {"longitude"}
    assert all(row["suite"] == "rope" and row["ms"] > 0 for row in found)
    assert err.count("\n") == 5  # what is at work


def test_rows_are_shown_and_drawn_later(
    rows: Path, longitude: Callable[..., Ran], tmp_path: Path
) -> None:
    outs = [tmp_path / name for name in ("c.html", "t.md", "again.jsonl")]
    code, out, err = longitude(
        "bench", "--from", str(rows), *(w for path in outs for w in ("--out", str(path)))
    )
    assert code == 0 and "rotate, half pairs" in out and "a copy of q and k" in out
    assert all(f"wrote {path}" in err for path in outs)
    assert "vegaEmbed" in outs[0].read_text(encoding="utf-8")
    assert "| **longitude** |" in outs[1].read_text(encoding="utf-8")
    assert outs[2].read_bytes() == rows.read_bytes()  # when they were made included


def test_rows_are_shown_without_torch_or_a_way_to_draw(rows: Path) -> None:
    ran = python("-c", BARE, "bench", "--from", str(rows))
    assert ran.returncode == 0 and "rotate, half pairs" in ran.stdout, ran.stderr
    ran = python("-c", BARE, "bench", "--from", str(rows), "--json")
    assert ran.returncode == 0 and len(ran.stdout.splitlines()) == 10, ran.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--suite", "trun"),
        ("--device", "tpu"),
        ("--dtype", "int8"),
        ("--tokens", "many"),
        ("--rounds", "0"),
        ("--suite", "rope", "--tokens", "32", "--only", "no such case"),
        ("--out", "rows.csv"),
        ("--from", "no/such/rows.jsonl"),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line(longitude: Callable[..., Ran], args: tuple[str, ...]) -> None:
    code, out, err = longitude("bench", *args)
    assert (code, out) == (2, "") and err.startswith("longitude: ") and err.count("\n") == 1


def test_only_some_cases(longitude: Callable[..., Ran]) -> None:
    code, out, err = longitude(*SMALL, "--only", "rotate, adjacent pairs: 1 ×", "--json")
    assert code == 0 and err.count("rotate, ") == 1
    assert {json.loads(line)["name"] for line in out.splitlines()} == {"rotate, adjacent pairs"}


def test_nothing_begins_when_the_time_is_over(longitude: Callable[..., Ran]) -> None:
    code, out, err = longitude(*SMALL, "--minutes", "0")
    assert code == 0 and out == "" and err.count("skipped: time limit reached") == 5
