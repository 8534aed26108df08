"""Every suite at toy sizes: everything of ours runs, and every way gives the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.suites import attention as attending
from benchmarks.suites import baselines, run
from benchmarks.suites import model as extending
from benchmarks.suites import rope as turning
from benchmarks.suites.case import measure
from benchmarks.suites.rope import Turn
from benchmarks.suites.rows import OURS, SUITES, Row
from benchmarks.suites.setup import Setup, Sizes, one_scheme, sampled, setup
from longitude import UserError

SMALL = replace(setup("cpu", peers=True, tokens=(48,)), compiles=False)


def rows(suite: str, how: Setup = SMALL, **more: Any) -> list[Row]:
    return [row for rows in run.run(how, (suite,), 1, **more) for row in rows]


@pytest.mark.parametrize("suite", SUITES)
def test_all_of_ours_runs_and_every_error_is_that_of_rounding(
    suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: extending.SCHEMES[name] for name in ("YaRN", "leaky ReRoPE")}
    monkeypatch.setattr(extending, "SCHEMES", few)  # each is a model
    found = rows(suite)
    assert {row.work.suite for row in found} == {suite}
    assert [row.order for row in found] == [*range(len(found))]
    for row in found:
        assert row.refused is None or row.kind not in (OURS, "baseline"), row
        if row.refused is None:
            assert row.ms and row.speed and row.peak is None and row.reached is None
            assert row.error is None or row.error < 3e-6, row
    if suite != "model":
        judged = [row for row in found if row.kind == OURS and "gradients" not in row.work.name]
        assert all(row.error is not None for row in judged)


def test_first_calls_have_lengths_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    ran = attending.attended

    def attended(scheme: Any, qkv: Any, weights: Any) -> Any:
        called.append(qkv[0].shape[2])
        return ran(scheme, qkv, weights)

    monkeypatch.setattr(attending, "attended", attended)
    kind = next(kind for kind in attending.KINDS if kind.first)
    case = attending.first_calls(SMALL, kind, Sizes(1, 2, 1, 48, 16), 8)
    found = measure(case, 2, False)
    assert [*called[-10:]] == [64] * 5 + [80] * 5
    assert [row.way for row in found[1:]] == [
        f"longitude, {n} call" for n in ("first", "second", "fifth")
    ]
    assert all(row.ms and row.speed and row.least and row.least <= row.speed for row in found)


def test_a_static_cache_gives_the_same_tokens_before_and_after_it_is_wound_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(extending, "ROOM", 3)
    model, steps = extending._model(SMALL, 1), []
    for token in (extending._token, extending.static_token):
        torch.manual_seed(5)  # keys and values are random
        run = token(model, 40)
        with torch.no_grad():
            steps.append([run() for _ in range(6)])
    growing, static = steps
    for n, logits in enumerate(static):
        torch.testing.assert_close(logits, growing[n % 3])
    assert not torch.allclose(growing[0], growing[1])


def test_a_length_that_no_kind_is_taken_to_has_no_rows() -> None:
    assert rows("attention", replace(SMALL, tokens=(2**18,))) == []
    with pytest.raises(UserError, match="no case has 'ALiBi'"):
        rows("attention", replace(SMALL, tokens=(2**18,)), only="ALiBi")


def test_peers_that_are_installed_are_measured_and_the_others_told() -> None:
    found = {row.way: row for row in rows("rope") if row.work.name == "rotate, adjacent pairs"}
    assert found["transformers"].speed and found["transformers"].error
    assert "transformers" not in {row.way for row in rows("rope", replace(SMALL, peers=False))}
    half = {row.way: row for row in rows("rope") if row.work.name == "rotate, half pairs"}
    assert half["x-transformers"].refused in ("it rotates adjacent pairs only", "not installed")


def test_a_wrong_output_has_a_large_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attending, "KINDS", attending.KINDS[:3])
    monkeypatch.setattr(attending, "attended", lambda scheme, qkv, weights: qkv[2])
    found = [row for row in rows("attention", replace(SMALL, peers=False)) if row.kind == OURS]
    assert all(row.error and row.error > 0.1 for row in found)


def test_what_breaks_off_is_told_for_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("benchmarks.suites.case.measure", broken)
    found = rows("rope", replace(SMALL, peers=False))
    assert found and {row.refused for row in found} == {"RuntimeError: out of memory"}


def test_no_case_begins_when_the_time_is_over() -> None:
    lines: list[str] = []
    assert rows("rope", seconds=-1.0, report=lines.append) == []
    assert len(lines) == 5 and all("skipped" in line for line in lines)


def test_every_row_of_the_issue_is_there() -> None:
    wanted = "leaky ReRoPE,Self-Extend,T5's bias,ALiBi,window + 4 sinks,dual chunk,streaming"
    wanted += ",LM-Infinite,YaRN + logn,DeBERTa,Transformer-XL,Shaw"
    kinds = {kind.name: kind for kind in attending.KINDS}
    assert not [name for name in wanted.split(",") if not kinds[name].goals]
    assert kinds["leaky ReRoPE"].windows == kinds["Self-Extend"].windows == (1024, 4096)
    assert kinds["leaky ReRoPE"].goals == {8192: 0.80, 32768: 0.92, 131072: 0.97}


@pytest.mark.parametrize(
    ("name", "error"),
    [("RoPE", 1.2), ("ALiBi", 1.2), ("T5's bias", 1.4), ("leaky ReRoPE", 1.4)],
)
def test_errors_may_be_larger_where_parts_merge(name: str, error: float) -> None:
    kind = next(kind for kind in attending.KINDS if kind.name == name)
    s = one_scheme(kind.text.format(w=64, eighth=8))
    assert attending._goal(kind, s, 8192)["error"] == error


def test_windows_shrink_with_the_call() -> None:
    assert [attending._window(1024, n) for n in (8192, 131072, 2048, 8)] == [1024, 1024, 256, 2]
    assert attending._window(0, 8192) == 0


def test_goals_are_a_cuda_devices() -> None:
    assert SMALL.goal({"speed": 1.0}) == {}
    assert replace(SMALL, device=torch.device("cuda")).goal({"speed": 1.0}) == {"speed": 1.0}


def test_rates_count_what_is_computed() -> None:
    s = Sizes(1, 2, 2, 8, 4)
    kind = attending.KINDS[0]
    # two products of n²/2 pairs, each a multiplication and an addition a dimension
    assert attending._operations(kind, s, 0) == 2 * 2 * (8 * 8 / 2) * 4 * 2
    assert attending._operations(replace(kind, best="windowed"), s, 2) == 2 * 2 * 16 * 4 * 2


def test_the_compiled_formula_is_the_turn() -> None:
    q, k, _ = SMALL.qkv(Sizes(2, 4, 2, 16, 8))
    t = Turn(q, k, torch.arange(16)[None])
    made, own = baselines._formula(q, k, *t.tables()), turning.ours(t)(q, k)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(made, own, strict=True))


def test_baselines_are_what_they_say() -> None:
    qkv = SMALL.qkv(Sizes(1, 2, 2, 16, 8))
    judge = attending.Judge(qkv)
    for base in (
        baselines.plain(SMALL, qkv),
        baselines.plain(SMALL, qkv, rotated=False),
        baselines.plain(SMALL, qkv, causal=False, rotated=False),
        baselines.windowed(SMALL, qkv, 4),
    ):
        assert judge.error(one_scheme(base.scheme), base.run()) < 1e-6


def test_sampled_rows_reach_both_ends() -> None:
    few = sampled(100_000, torch.device("cpu"))
    assert (len(few), int(few[0]), int(few[-1])) == (256, 0, 99_999)
    assert sampled(3, torch.device("cpu")).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"device": "tpu"}, "--device tpu is not available"),
        ({"dtype": "int8"}, "--dtype int8 is not supported"),
        ({"tokens": (64, 1)}, "--tokens takes lengths of 2 or more"),
    ],
)
def test_mistakes_are_sentences(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        setup(**{"device": "cpu", **asked})
    with pytest.raises(UserError, match="no suite is called 'trun'"):
        run.BenchOptions("trun").suites()
    assert run.BenchOptions().suites() == SUITES and run.BenchOptions("turn").suites() == ("rope",)
