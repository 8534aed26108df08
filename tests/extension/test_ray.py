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

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.extension.prepare import Prepared
from longitude.extension.ray import TRIES, on_ray
from longitude.extension.ray_worker import Errand, errands
from longitude.extension.run import News, local, missing
from tests.extension.clusters import Lost, play, small, told

OTHERWISE = ("seconds", "machine")  # what differs from run to run


def rows(store: Store) -> list[Any]:
    """Keys and values, but for what differs from run to run."""
    return [
        (row.key, {name: v for name, v in row.value.items() if name not in OTHERWISE})
        for row in store.rows()
    ]


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return small()


@pytest.fixture(scope="module")
def expected(prepared: Prepared) -> list[Any]:
    """The rows of a run in this process."""
    with Store(":memory:") as store:
        local(prepared.bench)(prepared.plan, prepared.plan.tasks(), store, lambda news: None)
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


def at_work() -> list[psutil.Process]:
    """The workers that measure something at this moment."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found += [process] if "Worker.measure" in " ".join(process.cmdline()) else []
        except psutil.Error:  # it has just ended
            continue
    return found


def kill_one(killed: list[int]) -> None:
    """Kill the first worker that is seen at work."""
    while not killed:
        for worker in at_work()[:1]:
            worker.send_signal(signal.SIGKILL)
            killed.append(worker.pid)
        time.sleep(0.05)


@pytest.mark.filterwarnings("default")  # Ray's own
def test_rows_are_those_of_a_local_run_though_a_worker_is_killed(
    prepared: Prepared, expected: list[Any], cluster: Any, tmp_path: Path
) -> None:
    heard: list[News] = []
    killed: list[int] = []
    killer = Thread(target=kill_one, args=(killed,), daemon=True)
    killer.start()
    with Store(tmp_path / "results.sqlite") as store:
        on_ray(prepared, store, missing(prepared.plan, store), heard.append)
        assert killed
        assert rows(store) == expected
        assert not missing(prepared.plan, store)
    shares = [news.share for news in heard]
    assert shares == sorted(set(shares)) and shares[0] == 0 and len(heard) == 6


# without a cluster


def test_a_failed_errand_is_tried_again_by_a_fresh_worker(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = prepared.plan.tasks()
    bad = errands(todo)[1]

    def answer(errand: Errand) -> Any:
        return Lost("gone") if errand == bad and ray.asked[bad] < TRIES else told(errand)

    ray = play(monkeypatch, answer)
    on_ray(prepared, store, todo, lambda news: None)
    assert len(list(store.rows())) == len(todo)
    assert ray.asked[bad] == TRIES and ray.made == 2 + TRIES - 1 == ray.killed


def test_an_errand_that_always_fails_is_told_when_the_others_are_done(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = prepared.plan.tasks()
    bad = errands(todo)[0]
    error = Lost("ray::Worker.measure()\n  File\nValueError: too odd.")
    ray = play(monkeypatch, lambda errand: error if errand == bad else told(errand))
    with pytest.raises(
        UserError, match=r"1 of the errands failed 4 times.*as it is, loss.*too odd\)"
    ):
        on_ray(prepared, store, todo, lambda news: None)
    assert ray.asked[bad] == TRIES
    assert len(list(store.rows())) == len(todo) - len(bad)


def test_a_mistake_is_not_tried_again(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = play(monkeypatch, lambda errand: "there is no such file." if not errand else [])
    with pytest.raises(UserError, match="could not go on: there is no such file"):
        on_ray(prepared, store, prepared.plan.tasks(), lambda news: None)
    assert ray.asked == {(): 2} and ray.killed == ray.made == 2


def test_workers_that_can_not_begin_leave_their_errands_to_others(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = prepared.plan.tasks()
    began: list[Any] = []

    def answer(errand: Errand) -> Any:
        began.extend([] if errand else [None])
        return Lost("no memory") if not errand and len(began) == 1 else told(errand)

    ray = play(monkeypatch, answer)
    on_ray(prepared, store, todo, lambda news: None)
    assert len(list(store.rows())) == len(todo) and ray.made == 2
    play(monkeypatch, lambda errand: Lost("No module named 'longitude'"))
    with pytest.raises(UserError, match="no worker of the cluster could begin: No module"):
        on_ray(prepared, store, todo, lambda news: None)


def test_ctrl_c_stops_the_workers(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watch(news: News) -> None:
        if news.done:
            raise KeyboardInterrupt

    ray = play(monkeypatch, told)
    with pytest.raises(KeyboardInterrupt):
        on_ray(prepared, store, prepared.plan.tasks(), watch)
    assert ray.killed == ray.made == 2


def test_a_cluster_without_gpus_can_not_take_a_model_on_one(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = replace(prepared.plan.subject, device="cuda")
    there = replace(prepared, plan=replace(prepared.plan, subject=subject))
    play(monkeypatch, told)
    with pytest.raises(UserError, match="no GPU"):
        on_ray(there, store, prepared.plan.tasks(), lambda news: None)
    ray = play(monkeypatch, told, GPU=3.0, CPU=64.0)
    on_ray(there, store, prepared.plan.tasks(), lambda news: None)
    assert ray.made == 3


def test_memory_bounds_the_workers(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(p.numel() * p.element_size() for p in prepared.bench.model.parameters())
    ray = play(monkeypatch, told, CPU=64.0, memory=float(7 * size))
    on_ray(prepared, store, prepared.plan.tasks(), lambda news: None)
    assert ray.made == 3


def test_without_ray_there_is_a_sentence(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"pip install 'longitude\[ray\]'"):
        on_ray(prepared, store, prepared.plan.tasks(), lambda news: None)


def test_without_a_cluster_there_is_a_sentence_at_once(
    prepared: Prepared, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def init(**options: Any) -> None:
        raise ConnectionError(f"Could not find any at {options['address']}. Please start one.")

    def refused(told: str) -> None:
        with pytest.raises(UserError, match=rf"{told}\): start one with `ray start --head`"):
            on_ray(prepared, store, prepared.plan.tasks(), lambda news: None)

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
