"""A budget: what still fits is measured, what does not is reported, and what is known is judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from longitude.core.store import Store
from longitude.core.validate import UserError, parse_seconds
from longitude.eval.records import CONTEXT, COST, KEPT, LOSS
from longitude.extension import api, measure
from longitude.extension.api import ExtendOptions, extend
from longitude.extension.measure import (
    Clock,
    OutOfTime,
    Pace,
    measurements,
    run_rounds,
    run_tasks,
)
from longitude.extension.plan import TargetModel
from longitude.extension.result import ExtendResult
from longitude.hf import load
from tests.extension.planted import PACE, Planted, plan_of

METHODS = {f"m{n}": 0.3 for n in range(6)}  # all alike, so that all stay in the race
PLAN = plan_of(*METHODS)
WHOLE = PACE.plan(PLAN)


def spent(seconds: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Planted, Clock, list[Any]]:
    """A run with so many seconds, by a clock that only tasks move: what ran, and its rows."""
    planted = Planted(PLAN, METHODS, {})
    planted.keeps_time(monkeypatch)
    clock = Clock(seconds, PACE)
    with Store(":memory:") as store:
        run_rounds(PLAN, store, "context", lambda ts: run_tasks(planted, ts, store, clock=clock))
        return planted, clock, measurements(PLAN, store)


def test_what_fits_is_left_alone(monkeypatch):
    planted, clock, _ = spent(WHOLE, monkeypatch)
    assert not clock.dropped and not clock.skipped and clock.notes(PLAN) == []
    assert {t.method for t in planted.ran} == {*PLAN.methods}


@pytest.mark.parametrize("share", [0.6, 0.3, 0.1, 0.03, 0.01])
def test_the_deadline_holds_and_what_is_missing_is_reported(share, monkeypatch):
    planted, clock, rows = spent(share * WHOLE, monkeypatch)
    assert planted.now <= share * WHOLE
    assert rows and clock.notes(PLAN)
    known = {(row.label, row.key.measure, row.key.length) for row in rows}
    assert ("baseline", LOSS, 1024) in known  # the most informative comes first
    for label in clock.dropped:
        assert f"{label}" in clock.notes(PLAN)[0]


def test_methods_that_were_dropped_stay_dropped(monkeypatch):
    planted = Planted(PLAN, METHODS, {})
    planted.keeps_time(monkeypatch)
    first = [task for task in PLAN.tasks() if task.document == 0]
    clock = Clock(0.8 * sum(PACE.task(PLAN, task) for task in first), PACE)
    with Store(":memory:") as store:
        run_tasks(planted, first, store, clock=clock)
        assert clock.dropped == {"m4", "m5"}  # the last of seven
        assert clock.notes(PLAN) == ["without m4, m5"]
        assert {t.method.label for t in planted.ran} == {"baseline", "m0", "m1", "m2", "m3"}
        clock.deadline = 1e9  # though there were time again
        run_tasks(planted, PLAN.all_tasks(), store, clock=clock)
    assert {t.round for t in planted.ran} == {0, 1, 2}
    assert not [t for t in planted.ran if t.method.label in clock.dropped]


def test_a_kind_that_does_not_fit_is_skipped_for_all_and_a_cheaper_one_may_still(monkeypatch):
    kinds = {kind: [t for t in PLAN.tasks() if t.measure == KEPT and t.length == kind]
             for kind in (1024, 256)}  # fmt: skip
    planted, room = Planted(PLAN, METHODS, {}), len(PLAN.methods)
    planted.keeps_time(monkeypatch)
    clock = Clock(1.9 * PACE.task(PLAN, kinds[1024][0]), PACE)
    assert clock.admit(PLAN, kinds[1024]) == []  # one method alone is no comparison
    assert clock.admit(PLAN, kinds[256]) == kinds[256] and len(kinds[256]) == room
    assert clock.notes(PLAN) == ["no kept context at 1,024"] and not clock.dropped


def test_a_short_budget_compares_remaps_with_other_methods(monkeypatch):
    names = ("linear", "ntk", "yarn", "rope(remap=rerope(64))", "rope(remap=self_extend(4, 64))")
    plan = plan_of(*names)
    Planted(plan, {}, {}).keeps_time(monkeypatch)
    tasks = [t for t in plan.tasks() if t.measure == KEPT and t.length == 256]
    clock = Clock(4.5 * PACE.task(plan, tasks[0]), PACE)
    kept = [t.method.label for t in clock.admit(plan, tasks)]
    assert kept == ["baseline", names[3], names[0], names[4]]
    assert clock.dropped == {"ntk", "yarn"}


def test_in_later_rounds_and_of_costs_what_is_left_out_is_named(monkeypatch):
    planted = Planted(PLAN, METHODS, {})
    planted.keeps_time(monkeypatch)
    later = [t for t in PLAN.tasks(1) if t.measure == KEPT and t.length == 256]
    clock = Clock(5.5 * PACE.task(PLAN, later[0]), PACE)
    assert clock.admit(PLAN, later) == [], "some would be known from more documents than others"
    costs = [t for t in PLAN.tasks(2) if t.measure == COST and t.length == 256]
    clock.deadline = 6.5 * PACE.task(PLAN, costs[0])
    assert clock.admit(PLAN, costs) == costs[:6] and not clock.dropped
    assert clock.notes(PLAN) == ["no kept context at 256 (round 2)", "no prefill at 256 of m5"]


def test_what_decides_nothing_drops_no_method(monkeypatch):
    planted = Planted(PLAN, METHODS, {})
    planted.keeps_time(monkeypatch)
    second = [t for t in PLAN.tasks() if t.document == 1]
    clock = Clock(3.5 * PACE.task(PLAN, second[0]), PACE)
    assert len(clock.admit(PLAN, second)) == 3 and not clock.dropped
    (note,) = clock.notes(PLAN)
    assert note.startswith("no loss of the first tokens of document 2 of ")


# on a model


@pytest.fixture
def slow(target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A model that takes a second for 512 tokens, by a clock that nothing else moves."""
    clock = SimpleNamespace(now=0.0, rate=1 / 512, read=[])

    def pass_time(module: Any, given: Any) -> None:
        clock.now += given[0].numel() * clock.rate
        clock.read.append(clock.now)

    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    for module in (api, measure):
        monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(ExtendResult, "write", lambda *_: None)
    monkeypatch.setattr("longitude.eval.tasks.cost.ROUNDS", 1)
    hook = target.model.get_input_embeddings().register_forward_pre_hook(pass_time)
    yield clock
    hook.remove()


def budgeted(target: TargetModel, folder: Path, budget: str) -> ExtendResult:
    options = ExtendOptions(
        methods="rerope; streaming", docs=1, tasks=("kept_context",), questions=1,
        tokenizer=target.tokenizer, out=str(folder), budget=budget,  # as good as a Path
    )  # fmt: skip
    return extend(target.model, to="2x", options=options)


def test_a_budget_ends_a_run_with_an_advice(target, slow, tmp_path):
    result = budgeted(target, tmp_path, "30s")
    assert slow.now <= 30 and result.best.sentence
    left_out = [n for n in result.recommendation["notes"] if n.startswith("left out to fit")]
    assert left_out and all("30s" in note for note in left_out)
    assert "Ended by the budget of 30s." in result.recommendation["notes"]
    rows = len(result.rows)
    slow.now = 0.0
    more = budgeted(target, tmp_path, "1h")  # goes on where it was stopped
    assert len(more.rows) > rows and more.best.label == "rerope(128)"
    assert not [n for n in more.recommendation["notes"] if n.startswith("left out")]


def test_a_forward_that_runs_over_is_cut_short(target, slow, tmp_path, monkeypatch):
    """Where the estimate was far too low."""
    monkeypatch.setattr(api, "time_model", lambda *_: Pace(1e-6, 0.0))
    result = budgeted(target, tmp_path, "15s")
    assert "Ended by the budget of 15s." in result.recommendation["notes"]
    assert slow.read[-2] <= 13.5 and slow.now <= 15  # no forward begins after the deadline
    assert {CONTEXT, LOSS} <= {row.key.measure for row in result.rows}
    assert result.best.sentence.endswith(".")
    with Store(tmp_path / "results.sqlite") as store:
        assert len([*store.rows()]) == len(result.rows)
    ids = target.tokenizer("as it was", return_tensors="pt").input_ids
    target.model(ids)  # no method and no deadline is left on the model


def test_a_deadline_raises_in_a_forward_and_only_inside(target, slow):
    clock = Clock(1.0, PACE)
    ids = target.tokenizer("x" * 400, return_tensors="pt").input_ids
    with clock.limit():
        target.model(ids)
        with pytest.raises(OutOfTime):
            target.model(ids), target.model(ids)
    target.model(ids)


def test_a_budget_for_nothing_says_what_it_takes(target, slow, tmp_path):
    with pytest.raises(UserError, match=r"within 1s: loading took 2 s, one forward of 512"):
        budgeted(target, tmp_path, "1s")


@pytest.mark.parametrize(("text", "want"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2H", 7200)])
def test_times_are_read(text, want):
    assert parse_seconds(text) == want


@pytest.mark.parametrize("text", ["", "0m", "-3", "soon", "5d"])
def test_no_time_is_told(text):
    with pytest.raises(UserError, match=r"--budget.*10m"):
        parse_seconds(text)


def test_a_busy_machine_gives_the_estimate_of_a_free_one(monkeypatch):
    prepared = api._prepared("tiny-rope", "2x", ExtendOptions(docs=1, tasks=()))
    found = []
    for slow in (0.01, 0.4):  # seconds that all forwards but the sixth take
        times = iter([slow] * 5 + [0.01] + [slow] * 9)
        now = [0.0]
        monkeypatch.setattr(measure.time, "perf_counter", lambda now=now: now[0])
        monkeypatch.setattr(
            measure, "losses", lambda *_, now=now, times=times: now.append(now.pop() + next(times))
        )
        found.append(measure.time_model(prepared).forward(256))
    assert found[1] == pytest.approx(found[0])


def test_a_short_table_of_positions_is_timed_inside_it(tmp_path: Path) -> None:
    shape = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape))
    model.save_pretrained(tmp_path)
    tokenizer: Any = load("tiny-learned", quiet=True)[1]
    tokenizer.save_pretrained(tmp_path)
    estimate = api.estimate(tmp_path, to="4x", options=ExtendOptions(docs=1, tasks=()))
    assert estimate.to_json()["trained"] == 64
