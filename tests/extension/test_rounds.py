"""Successive elimination: documents are spent on the methods that may still be the best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longitude.core.store import Store
from longitude.eval.records import COST, KEPT, RETRIEVAL
from longitude.extension.measure import MEANINGLESS, measurements, run_rounds, run_tasks
from longitude.extension.plan import Plan
from longitude.extension.rank import Ranking
from tests.extension.planted import PROTOCOL, Planted, plan_of

ALIKE = {"a": 0.3, "b": 0.3, "worse": 0.1}
OUTSTANDING = {"a": 0.3, "worse": 0.1, "worst": 0.0}


def ran(
    kept: dict[str, float], over: dict[str, float] | None = None, goal: str = "context",
    budgeted: bool = False, **more: Any,
) -> tuple[Planted, list[Any], str]:  # fmt: skip
    """A run of methods that keep these shares: what ran, its rows and how it ended."""
    planted = Planted(plan_of(*kept, protocol=replace(PROTOCOL, **more)), kept, over or {})
    with Store(":memory:") as store:
        said = run_rounds(
            planted.plan, store, goal, lambda tasks: run_tasks(planted, tasks, store), budgeted
        )
        return planted, measurements(planted.plan, store), said


def test_who_is_beaten_is_not_measured_any_more() -> None:
    planted, _, said = ran(ALIKE)
    assert planted.rounds_of("a") == planted.rounds_of("b") == {0, 1, 2}
    assert planted.rounds_of("worse") == planted.rounds_of("worse", RETRIEVAL) == {0}
    assert said == "Ended with the last of 3 rounds; still in the race: a, b."


def test_it_ends_when_one_stands_out() -> None:
    planted, _, said = ran(OUTSTANDING)
    assert all(planted.rounds_of(label) == {0} for label in OUTSTANDING)
    assert said == "Ended after round 1 of 3: a stands out (95 %)."


def test_one_alone_is_measured_until_it_qualifies() -> None:
    planted, rows, said = ran({"a": 0.005})  # too little for a few documents
    assert not Ranking([r for r in rows if r.key.at.get("round", 0) == 0], 1024).keeps("a", 1024)
    assert planted.rounds_of("a") == {0, 1, 2}
    assert said == "Ended with the last of 3 rounds; still in the race: a."


def test_it_ends_when_none_is_left() -> None:
    planted, _, said = ran({"a": -0.2, "b": -0.2})
    assert planted.rounds_of("a") == {0}
    assert said == "Ended after round 1 of 3: no method is left in the race (95 %)."


@pytest.mark.parametrize("kept", [ALIKE, OUTSTANDING])
def test_costs_are_those_of_every_method_and_come_last(kept: dict[str, float]) -> None:
    planted, *_ = ran(kept)
    costs = [(t.method.label, t.length) for t in planted.ran if t.measure == COST]
    assert costs == [(m.label, n) for n in (1024, 256) for m in planted.plan.methods]
    assert [t.measure for t in planted.ran[-len(costs) :]] == [COST] * len(costs)
    assert not [t for t in ran(kept, cost=False)[0].ran if t.measure == COST]


def test_the_baseline_is_measured_further_inside_its_window_only() -> None:
    planted, *_ = ran(ALIKE)
    further = [t for t in planted.ran if t.method.patch is None and t.round]
    assert further and {t.length for t in further} == {256}


def test_middle_lengths_are_measured_once() -> None:
    planted, *_ = ran(ALIKE)
    assert {t.round for t in planted.ran if t.length == 512} == {0}
    assert {t.length for t in planted.ran if t.round == 2} == {256, 1024}


def test_what_a_continued_run_has_of_later_rounds_does_not_decide_earlier_ones() -> None:
    planted, *_ = ran(ALIKE)
    other = Planted(planted.plan, {**ALIKE, "a": -5.0}, {})  # as if a's later documents said so
    with Store(":memory:") as store:
        later = [task for task in planted.ran if task.round and task.method.label == "a"]
        run_tasks(other, later, store)
        run_tasks(other, [task for task in planted.ran if task.measure == COST], store)
        again = Planted(planted.plan, ALIKE, {})
        run_rounds(planted.plan, store, "context", lambda tasks: run_tasks(again, tasks, store))
    assert again.rounds_of("b") == {0, 1}  # then a is out, and b stands out


def test_under_a_budget_every_round_comes_before_what_decides_nothing() -> None:
    """Other documents' losses, lengths in between and costs, in this order; nothing is lost."""
    planted, rows, _ = ran(ALIKE, budgeted=True)
    decisive = [planted.plan.decides(task) for task in planted.ran]
    assert decisive == sorted(decisive, reverse=True) and 2 in planted.rounds_of("a")
    rest = planted.ran[decisive.index(False) :]
    kinds = [(task.document is None, task.measure == COST) for task in rest]
    assert kinds == sorted(kinds) and len(set(kinds)) == 3
    keys, unhurried = ({str(r.key) for r in found} for found in (rows, ran(ALIKE)[1]))
    assert keys == unhurried


def test_better_by_any_measure_stays_in_the_race() -> None:
    planted, *_ = ran({"a": 0.3, "b": 0.1}, over={"a": 0.3})  # b has the lower loss
    assert planted.rounds_of("b") == {0, 1, 2}


def test_a_loss_just_above_what_is_sane_takes_several_documents_to_tell() -> None:
    planted, *_ = ran({**ALIKE, "mad": 0.5}, over={"mad": 0.6})
    assert not planted.rounds_of("mad")
    budgeted, *_ = ran({**ALIKE, "mad": 0.5}, over={"mad": 0.6}, budgeted=True)
    assert budgeted.rounds_of("mad") == {0}


def test_an_insane_loss_is_left_out_of_what_would_mean_nothing() -> None:
    planted, rows, _ = ran({**ALIKE, "mad": 0.5}, over={"mad": 5.0})
    assert not planted.rounds_of("mad") and not planted.rounds_of("mad", RETRIEVAL)
    refused = [row for row in rows if row.label == "mad" and row.key.measure in (KEPT, RETRIEVAL)]
    assert refused and {row.refused for row in refused} == {MEANINGLESS}
    assert {row.key.at["round"] for row in refused} == {0}
    past = [t.length for t in planted.ran if t.method.patch is None and t.measure == KEPT]
    assert {*past} == {256}  # the baseline's, too: at 9 nats


def test_what_a_run_refused_by_fewer_losses_is_measured_once_more_tell() -> None:
    """As after a budget: its one document was the only one that spoke against the method."""
    planted = Planted(plan_of(*ALIKE, "odd"), {**ALIKE, "odd": 0.5}, {"odd": 5.0})
    first = replace(planted.plan, texts=planted.plan.texts[:1])
    with Store(":memory:") as store:

        def run(plan: Plan) -> set[str | None]:
            run_rounds(plan, store, "context", lambda tasks: run_tasks(planted, tasks, store))
            rows = measurements(planted.plan, store)
            return {r.refused for r in rows if r.label == "odd" and r.key.measure == COST}

        assert run(first) == {MEANINGLESS}
        planted.over = {"odd": -2.0}
        assert run(planted.plan) == {None}
        before = len(planted.ran)
        assert run(planted.plan) == {None} and len(planted.ran) == before


@pytest.mark.parametrize(("kept", "after"), [(OUTSTANDING, 20), (ALIKE, 1), (ALIKE, 55)])
def test_a_run_that_is_continued_measures_what_one_in_one_go_does(
    kept: dict[str, float], after: int
) -> None:
    whole, rows, said = ran(kept)
    planted = Planted(whole.plan, kept, {})
    with Store(":memory:") as store:

        def run(tasks: Any) -> None:
            if len(planted.ran) < after:
                run_tasks(planted, tasks[: after - len(planted.ran)], store)
            if len(planted.ran) == after:
                raise KeyboardInterrupt

        if after < len(whole.ran):
            with pytest.raises(KeyboardInterrupt):
                run_rounds(whole.plan, store, "context", run)
        for _ in range(2):  # and once more: nothing is left to do
            again = run_rounds(
                whole.plan, store, "context", lambda tasks: run_tasks(planted, tasks, store)
            )
            assert again == said
            assert planted.ran == whole.ran
            assert measurements(whole.plan, store) == rows
