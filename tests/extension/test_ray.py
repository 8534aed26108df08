"""The same plan on a Ray cluster: the rows of a local run, whatever befalls the workers.

The cluster itself is Ray's, of two workers on this machine; what Ray may answer (a lost worker, an
error, a sentence) is played by a stand-in, which is exact and fast.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import longitude
from longitude.core.progress import Event, silent
from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.extension.cost_model import on_ranks
from longitude.extension.measure import Evaluator, missing, run_tasks
from longitude.extension.plan import Prepared, TargetModel
from longitude.extension.ranks import choose
from longitude.extension.ray import (
    TRIES,
    Group,
    Worker,
    WorkerSpec,
    _room,
    groups,
    room,
    run_on_ray,
)
from longitude.training import distributed
from tests.extension.clusters import SMALL, Lost, answered, play, small
from tests.extension.test_ranks import CLOSE

OTHERWISE = ("seconds", "machine")  # what differs from run to run


def rows(store: Store) -> list[Any]:
    """Keys and values, but for what differs from run to run."""
    return [
        (row.key, {name: v for name, v in row.value.items() if name not in OTHERWISE})
        for row in store.rows()
    ]


@pytest.fixture(scope="module")
def prepared(target: TargetModel) -> Prepared:
    return small(target)


@pytest.fixture(scope="module")
def expected(prepared: Prepared) -> list[Any]:
    """The rows of a run in this process."""
    with Store(":memory:") as store:
        evaluator = Evaluator(prepared.plan, prepared.target, prepared.documents)
        run_tasks(evaluator, prepared.plan.tasks(), store)
        return rows(store)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as store:
        yield store


# on Ray itself


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two workers here, with nothing that calls home or opens a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        ray = pytest.importorskip("ray")
        quiet: Any = {"log_to_driver": False, "logging_level": "error"}
        ray.init("local", num_cpus=2, include_dashboard=False, **quiet)
        yield ray
        ray.shutdown()


def at_work(call: str) -> list[psutil.Process]:
    """The workers that are in this call at this moment."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] if call in " ".join(process.cmdline()) else []
        except psutil.Error:  # it has just ended
            continue
    return found


def kill_one(killed: list[int], call: str = "Worker.measure") -> None:
    """Kill the first worker that is seen at work."""
    while not killed:
        for worker in at_work(call)[:1]:
            worker.send_signal(signal.SIGKILL)
            killed.append(worker.pid)
        time.sleep(0.05)


@pytest.mark.filterwarnings("default")  # Ray's own
def test_rows_are_those_of_a_local_run_though_a_worker_is_killed(
    prepared: Prepared, expected: list[Any], cluster: Any, tmp_path: Path
) -> None:
    events: list[Event] = []
    killed: list[int] = []
    killer = Thread(target=kill_one, args=(killed,), daemon=True)
    killer.start()
    todo = prepared.plan.tasks()
    with Store(tmp_path / "results.sqlite") as store:
        run_on_ray(prepared, todo, store, events.append)
        assert killed
        assert rows(store) == expected
        assert not missing(prepared.plan, todo, store)
    done = [event.done for event in events]
    assert done == sorted(done) and done[0] == 0 and 2 <= len(events) <= 9


@pytest.mark.slow  # four processes import torch
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ranks_of_a_group_share_each_text_though_one_is_killed(
    prepared: Prepared, expected: list[Any], cluster: Any, store: Store
) -> None:
    shared = replace(prepared, ranks=2)
    killed: list[int] = []
    Thread(target=kill_one, args=(killed, "Worker.follow"), daemon=True).start()
    run_on_ray(shared, prepared.plan.tasks(), store, silent)
    assert killed
    assert [key for key, _ in rows(store)] == [key for key, _ in expected]
    assert all(row.value["machine"].startswith("2 ranks: ") for row in store.rows())
    for (key, got), (_, want) in zip(rows(store), expected, strict=True):
        for name in CLOSE[key["measure"]][0] & want.keys():
            close = CLOSE[key["measure"]][1]
            numbers = [torch.tensor(value[name]).double() for value in (got, want)]
            torch.testing.assert_close(*numbers, rtol=close, atol=close)


# without a cluster


def test_a_group_of_ranks_is_placed_on_one_machine_if_any_has_room(prepared: Prepared) -> None:
    def placed(ranks: int, *gpus: int, dead: int = 0) -> tuple[int, str]:
        subject = replace(prepared.plan.subject, device="cuda")
        there = replace(prepared, plan=replace(prepared.plan, subject=subject), ranks=ranks)
        nodes = [{"Alive": True, "Resources": {"GPU": float(n)}} for n in gpus]
        nodes += [{"Alive": True, "Resources": {"CPU": 4.0}}]  # of the head
        nodes += [{"Alive": False, "Resources": {"GPU": float(dead)}}]
        total = {"GPU": float(sum(gpus)), "CPU": 4.0}
        ray = SimpleNamespace(cluster_resources=lambda: total, nodes=lambda: nodes)
        return _room(ray, there)

    assert placed(4, 8, 7) == (3, "STRICT_PACK") and placed(1, 8, 7) == (15, "")
    assert placed(4, 3, 3, 3) == (2, "PACK")
    said = r"--context-parallel 4 needs a GPU for each rank, but the cluster has room for 3: give"
    with pytest.raises(UserError, match=said):
        placed(4, 2, 1, dead=8)


def test_a_text_that_one_worker_cant_hold_is_shared_by_as_few_as_can(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target = prepared.target.model, prepared.plan.target
    on_ray = replace(prepared, options=replace(prepared.options, engine="ray"))
    needs = {n: distributed.SPARE * on_ranks(model, target, n).memory for n in (1, 3, 6)}
    for has, ranks in ((needs[1], 1), (needs[3], 3), (needs[6], 6)):
        monkeypatch.setattr(distributed, "device_bytes", lambda device, has=has: has)
        choose(on_ray, lambda prepared: 6)
        assert on_ray.ranks == ranks
        assert on_ray.sharing.endswith(f"each text is split over {ranks} ranks") == (ranks > 1)
    given = replace(on_ray, options=replace(on_ray.options, context_parallel=2))
    choose(given, lambda prepared: 6)
    assert given.ranks == 2 and not given.sharing, "what is given goes"
    ray = play(monkeypatch, answered)
    assert room(on_ray) == ray.cluster_resources()["CPU"]


def test_a_cluster_too_small_for_a_group_starts_no_worker(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = play(monkeypatch, answered)
    four = replace(prepared, ranks=4)
    with pytest.raises(UserError, match="needs a CPU and memory for the model for each rank, but"):
        run_on_ray(four, prepared.plan.tasks(), store, silent)
    assert not ray.made


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"context_parallel": 2}, r"but got 2 with --engine local: use torchrun"),
        ({"context_parallel": 0, "engine": "ray"}, "but got 0 with --engine ray"),
        ({"context_parallel": 2, "engine": "ray", "search": True}, "--search runs on one device"),
        ({"context_parallel": 128, "engine": "ray"}, "window of 256 tokens is too short for 128"),
    ],
)
def test_options_of_groups_that_make_no_sense_are_a_sentence(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        longitude.extend(options=replace(SMALL, out=tmp_path, **given))


def test_a_failed_group_is_tried_again_by_a_fresh_worker(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = prepared.plan.tasks()
    bad = groups(todo)[1]

    def answer(group: Group) -> Any:
        return Lost("gone") if group == bad and ray.requests[bad] < TRIES else answered(group)

    ray = play(monkeypatch, answer)
    run_on_ray(prepared, todo, store, silent)
    assert len(list(store.rows())) == len(todo)
    assert ray.requests[bad] == TRIES and ray.made == 2 + TRIES - 1 == ray.killed


def test_an_group_that_always_fails_is_told_when_the_others_are_done(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = prepared.plan.tasks()
    bad = groups(todo)[0]
    error = Lost("ray::Worker.measure()\n  File\nValueError: too odd.")
    ray = play(monkeypatch, lambda group: error if group == bad else answered(group))
    with pytest.raises(
        UserError, match=r"1 groups of tasks failed 4 times.*baseline, loss.*too odd\)"
    ):
        run_on_ray(prepared, todo, store, silent)
    assert ray.requests[bad] == TRIES
    assert len(list(store.rows())) == len(todo) - len(bad)


def test_a_mistake_is_not_tried_again(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = play(monkeypatch, lambda group: "there is no such file." if not group else [])
    with pytest.raises(UserError, match="could not go on: there is no such file"):
        run_on_ray(prepared, prepared.plan.tasks(), store, silent)
    assert ray.requests == {(): 2} and ray.killed == ray.made == 2


def test_workers_that_can_not_begin_leave_their_groups_to_others(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = prepared.plan.tasks()
    began: list[Any] = []

    def answer(group: Group) -> Any:
        began.extend([] if group else [None])
        return Lost("no memory") if not group and len(began) == 1 else answered(group)

    ray = play(monkeypatch, answer)
    run_on_ray(prepared, todo, store, silent)
    assert len(list(store.rows())) == len(todo) and ray.made == 2
    play(monkeypatch, lambda group: Lost("No module named 'longitude'"))
    with pytest.raises(UserError, match="no worker of the cluster could begin: No module"):
        run_on_ray(prepared, todo, store, silent)


def test_ctrl_c_stops_the_workers(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(event: Event) -> None:
        if event.done:
            raise KeyboardInterrupt

    ray = play(monkeypatch, answered)
    with pytest.raises(KeyboardInterrupt):
        run_on_ray(prepared, prepared.plan.tasks(), store, watch)
    assert ray.killed == ray.made == 2


def test_a_cluster_without_gpus_can_not_take_a_model_on_one(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = replace(prepared.plan.subject, device="cuda")
    there = replace(prepared, plan=replace(prepared.plan, subject=subject))
    play(monkeypatch, answered)
    with pytest.raises(UserError, match="no GPU"):
        run_on_ray(there, prepared.plan.tasks(), store, silent)
    ray = play(monkeypatch, answered, GPU=3.0, CPU=64.0)
    run_on_ray(there, prepared.plan.tasks(), store, silent)
    assert ray.made == 3


def test_memory_bounds_the_workers(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() * p.element_size() for p in prepared.target.model.parameters())
    ray = play(monkeypatch, answered, CPU=64.0, memory=float(7 * size))
    run_on_ray(prepared, prepared.plan.tasks(), store, silent)
    assert ray.made == 3


def test_without_ray_there_is_a_sentence(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pip install 'longitude\[ray\]'"):
        run_on_ray(prepared, prepared.plan.tasks(), store, silent)


def test_without_a_cluster_there_is_a_sentence_at_once(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError(f"Could not find any at {options['address']}. Please start one.")

    def refused(told: str) -> None:
        with pytest.raises(UserError, match=rf"{told}\): start one with `ray start --head`"):
            run_on_ray(prepared, prepared.plan.tasks(), store, silent)

    absent = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", absent)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    refused(r"'auto' \(Could not find any at auto")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(where)
        refused(rf"'{where}' \(Could not find any at {where}")
    refused(rf"'{where}' \(.*refused")  # nobody is there any more
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    refused(r"'nonsense' \(Could not find any at nonsense")


# in a worker


def test_questions_of_a_kind_go_together(prepared: Prepared) -> None:
    plan = replace(prepared.plan, protocol=replace(prepared.plan.protocol, cost=True, rounds=1))
    found = groups([*reversed(plan.tasks())])
    assert sorted(map(len, found)) == [1] * 4 + [2] * 6  # documents; kept context, answers, costs
    assert sum(found, start=()) and {t for e in found for t in e} == {*plan.tasks()}
    for group in found:
        assert len({(t.method, t.measure, t.document) for t in group}) == 1
        assert [t.length for t in group] == sorted(t.length for t in group)


def test_other_weights_are_refused(prepared: Prepared) -> None:
    subject = replace(prepared.plan.subject, weights="0123456789abcdef")
    spec = replace(WorkerSpec.of(prepared), plan=replace(prepared.plan, subject=subject))
    answer = Worker(spec).begin()
    assert isinstance(answer, str)
    assert "has other weights here" in answer and "0123456789" in answer


def test_a_path_is_the_same_elsewhere(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    subject = replace(prepared.plan.subject, name="mine")
    here = replace(prepared, plan=replace(prepared.plan, subject=subject))
    assert WorkerSpec.of(here).model == str(tmp_path.resolve() / "mine")
    assert WorkerSpec.of(prepared).model == "tiny-rope"
