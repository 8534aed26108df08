"""`extend` over two ranks measures what one process measures, and continues after a lost rank.

The ranks share each text where memory is too small for one, else the methods.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import longitude
from longitude.core.validate import UserError
from longitude.extension.plan import ExtendOptions
from tests.processes import run

# the numbers of a metric that times don't change, and how close they are
CLOSE = {
    "loss": ({"means", "past", "bins"}, 1e-5),
    "context": ({"loss"}, 1e-5),
    "kept_context": ({"share"}, 1e-4),
    "retrieval": ({"loss", "exact"}, 1e-5),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("tests.extension.rank_runs", tmp_path_factory.mktemp("ranks"), 2)


def test_two_ranks_recommend_and_measure_what_one_process_does(found: list[dict[str, Any]]) -> None:
    one, ranks = found[0]["one"], found[0]["ranks"]
    assert found[1]["ranks"] == ranks, "every rank has the same result"
    assert ranks["best"] == one["best"] and ranks["rows"].keys() == one["rows"].keys()
    measures = set()
    for key, value in one["rows"].items():
        other, measure = ranks["rows"][key], json.loads(key)["measure"]
        assert other["refused"] == value["refused"]
        assert value["refused"] or other["machine"].startswith("2 ranks: ")
        measures.add(measure)
        for name in CLOSE.get(measure, (set(), 0))[0] & value.keys():
            got, want = torch.tensor(other[name]), torch.tensor(value[name])
            close = CLOSE[measure][1]
            torch.testing.assert_close(got.double(), want.double(), rtol=close, atol=close)
        if measure == "cost" and not value["refused"]:
            assert other["prefill"] > 0 and other["decode"] > 0 and other["peak"] > 0
    assert measures == {*CLOSE, "cost"}


def test_the_first_rank_alone_writes_and_says_how_texts_are_spread(
    found: list[dict[str, Any]],
) -> None:
    first, second = found
    why = (
        r"512 tokens need about [\d.]+ GiB, one process has [\d.]+: each text is split over 2 ranks"
    )
    assert re.search(f"{why}, at most 256 tokens on each$", first["said"][1])
    assert first["said"][1].endswith(first["dry"]), "a dry run says it, too"
    assert (first["wrote"], second["wrote"]) == (1, 0)
    assert second["said"] == ["loading tiny-rope"]


def test_ranks_that_hold_a_text_each_share_the_methods(found: list[dict[str, Any]]) -> None:
    one, side = found[0]["one"], found[0]["side"]
    assert found[1]["side"] == side, "every rank has the same result"
    assert side["best"] == one["best"] and side["rows"].keys() == one["rows"].keys()
    for key, value in one["rows"].items():
        changing = {"seconds", "prefill", "decode", "peak", "machine"}
        other = side["rows"][key]
        assert "ranks" not in (other["machine"] if not other["refused"] else "")
        if json.loads(key)["measure"] != "cost":
            kept = value.keys() - changing
            assert {n: other[n] for n in kept} == {n: value[n] for n in kept}
    said = found[0]["side_said"]
    assert said[1].endswith("2 ranks share the methods")
    assert any(" and " in stage for stage in said[2:]), "two methods are measured at once"


def test_a_lost_rank_ends_the_others_and_the_run_continues(found: list[dict[str, Any]]) -> None:
    assert found[0]["lost"].startswith("a rank of the group does not answer")
    assert "tasks are recorded" in found[0]["said"][1]


def test_what_cant_run_over_ranks_is_said_by_all(
    found: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in found:
        assert rank["refused"].startswith("Qwen3NextForCausalLM has layers that read tokens in")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--budget needs one process, but torchrun has started 2"):
        longitude.extend(options=ExtendOptions(budget="1m", out=tmp_path))
