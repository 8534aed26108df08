"""A worker of a cluster measures what the process that sent it would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from longitude.core.store import Store
from longitude.extension.prepare import Prepared
from longitude.extension.ray_worker import Kit, Worker, errands, known_of
from tests.extension.clusters import SMALL, small


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return small()


def test_questions_of_a_kind_go_together(prepared: Prepared) -> None:
    plan = replace(prepared.plan, protocol=replace(prepared.plan.protocol, cost=True))
    found = errands([*reversed(plan.tasks())])
    assert sorted(map(len, found)) == [1] * 4 + [2] * 4
    assert sum(found, start=()) and {t for e in found for t in e} == {*plan.tasks()}
    for errand in found:
        assert len({(t.method, t.measure, t.document) for t in errand}) == 1
        assert [t.length for t in errand] == sorted(t.length for t in errand)


def test_a_worker_that_goes_on_knows_what_was_told_at_the_length_before(
    prepared: Prepared,
) -> None:
    plan = prepared.plan
    (before, after), *_ = [e for e in errands(plan.tasks()) if e[0].measure == "passkey"]
    with Store(":memory:") as store:
        for asked in plan.asked(before):
            store.put(asked.to_json(), {"label": "baseline", "right": [False]})
        known = known_of(plan, (after,), store)
    assert len(known) == len(plan.asked(before))
    worker = Worker(Kit.of(prepared))
    found = worker.measure((after,), known)
    assert [v["assumed"] for _, v in found] == ["none of 2 told at 256."] * 2  # type: ignore[index]
    assert {k["length"] for k, _ in found} == {512}  # type: ignore[index]


def test_other_weights_are_refused(prepared: Prepared) -> None:
    subject = replace(prepared.plan.subject, weights="0123456789abcdef")
    kit = replace(Kit.of(prepared), plan=replace(prepared.plan, subject=subject))
    told = Worker(kit).begin()
    assert isinstance(told, str) and "has other weights here" in told and "0123456789" in told


def test_a_path_is_the_same_elsewhere(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    here = replace(prepared, options=replace(SMALL, model="mine"))
    assert Kit.of(here).options.model == str(tmp_path.resolve() / "mine")
    assert Kit.of(prepared).options.model == "tiny-rope"
