"""The page of fine-tuned extensions says what its rows say."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tune() -> Any:
    spec = spec_from_file_location("tune_page", DOCS / "scripts" / "tune.py")
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def outcome(base: str, loss: float) -> dict[str, Any]:
    measured = {
        s: {"context": {"512": {"mean": loss + n}}} for n, s in enumerate(("after", "before"))
    }
    return {
        "base": base, "out": "/secret/run", "folder": "/secret/run/model", "kind": "adapter",
        "recipe": {"name": "pi", "trained": "lora"}, "scheme": "rope(frequencies=linear(2))",
        "target": 512, "steps": 300, "seconds": 90.0, "measured": measured, "machine": "a | b",
        "verdict": {"numbers": {"tax": {"mean": 0.0125}}},
    }  # fmt: skip


def test_the_committed_page_is_that_of_its_rows(tune: Any) -> None:
    tune.main(["--check"])


def test_outcomes_become_rows_and_tables(tune: Any, tmp_path: Path) -> None:
    page = tmp_path / "tune.md"
    page.write_text((DOCS / "results" / "tune.md").read_text(encoding="utf-8"), encoding="utf-8")
    for name, row in {
        "a": outcome("tiny-rope", 2.5),
        "b": outcome("/some/where/Smol", 1.0),
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    tune.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")], page)
    text = page.read_text(encoding="utf-8")
    assert "–, 3.500, 2.500" in text and "–, 2.000, 1.000" in text and "+0.013" in text
    assert "Not measured yet" in text  # of the steps, still
    assert (
        "secret" not in text + page.with_suffix(".jsonl").read_text() and "some/where" not in text
    )
    tune.main(["--check"], page)


def test_old_and_new_rows_are_told_alike(tune: Any) -> None:
    old, new = outcome("tiny-rope", 2.5), outcome("tiny-alibi", 1.5)
    old["measured"] |= {"as it is": {"passkey": {"512": {"mean": 0.25}}}}
    new["measured"] |= {"baseline": {"kept_context": {"512": {"mean": 0.18}}}}
    new["measured"]["after"]["retrieval"] = {"512": {"mean": 0.5}}
    new["verdict"] = {"numbers": {"in_window_cost": {"mean": -0.02}}}
    heads, _, first, second = tune.tuned_table([old, new]).splitlines()
    for what in ("loss", "kept context", "answers"):
        assert f"| {what}: baseline, before, after |" in heads
    assert "| –, 3.500, 2.500 |  | 25%, –, – | +0.013 |" in first
    assert "| –, 2.500, 1.500 | 18%, –, – | –, –, 50% | -0.020 |" in second
    assert "kept context" not in tune.tuned_table([old])


def test_a_newer_outcome_takes_the_place_of_an_older(tune: Any) -> None:
    rows = tune.with_row([], outcome("tiny-rope", 2.5))
    rows = tune.with_row(rows, outcome("tiny-rope", 2.25))
    rows = tune.with_row(rows, outcome("tiny-alibi", 2.0))
    assert [row["measured"]["after"]["context"]["512"]["mean"] for row in rows] == [2.25, 2.0]


def test_a_stale_page_fails(tune: Any, tmp_path: Path) -> None:
    page = tmp_path / "tune.md"
    page.write_text("<!-- steps -->\nan old table\n<!-- /steps -->\n")
    with pytest.raises(SystemExit, match="not those of its rows"):
        tune.main(["--check"], page)
