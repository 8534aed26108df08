"""The same plan on a Ray cluster (Moritz et al. 2018, arXiv:1712.05889), which exists already.

Each worker (worker.py) is an actor with a CPU, and a GPU where the model is on one: an actor and no
bare task, so that the model is loaded once and keeps its GPU. Only this process writes rows down.
An errand that fails goes to a fresh worker, since a killed process or a broken GPU takes no more.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
import socket
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError, short, shown
from longitude.extension.plan import Plan, Task
from longitude.extension.prepare import Prepared
from longitude.extension.ray_worker import CPUS, Errand, Kit, Worker, errands, known_of
from longitude.extension.run import News, Watch, Work, work

TRIES = 4  # of an errand, and of a worker's start
PATIENCE = 10.0  # seconds to reach the cluster
ROOM = 2  # times the model's size that a worker on a CPU takes of the memory


def on_ray(prepared: Prepared, store: Store, todo: Sequence[Task], watch: Watch) -> None:
    """Run these tasks on the cluster and record their rows as they arrive."""
    if not todo:
        return
    # Ray prints what befell its workers, and standard output is for data
    with redirect_stdout(sys.stderr), _cluster() as ray:
        run = _Run(ray, prepared, store, todo, watch)
        try:
            run.all()
        finally:  # also where someone pressed Ctrl-C
            run.stop()


class _Run:
    """Errands given out one by one to whichever worker is free."""

    def __init__(
        self, ray: Any, prepared: Prepared, store: Store, todo: Sequence[Task], watch: Watch
    ) -> None:
        self.ray, self.plan, self.store, self.watch = ray, prepared.plan, store, watch
        self.errands = deque(errands(todo))
        self.progress = _Progress(prepared.plan, todo)
        self.given: dict[Any, tuple[Any, Errand]] = {}  # what is awaited: from whom, and for what
        self.workers: list[Any] = []
        self.failures: Counter[Errand] = Counter()
        self.lost: list[str] = []
        gpus = int(prepared.plan.subject.device == "cuda")
        self.seats = min(len(self.errands), _room(ray.cluster_resources(), prepared, gpus))
        self.make = ray.remote(Worker).options(num_cpus=CPUS, num_gpus=gpus)
        self.kit = ray.put(Kit.of(prepared))

    def all(self) -> None:
        """Every errand, until it is done or lost."""
        self._tell(())
        for _ in range(self.seats):
            self._start()
        while self.errands or any(errand for _, errand in self.given.values()):
            self._next()
        if self.lost:
            raise UserError(
                f"--engine ray: {len(self.lost)} of the errands failed {TRIES} times, first "
                f"{self.lost[0]}; all others are recorded, and the same command tries again."
            )

    def stop(self) -> None:
        """Let go of the workers, whatever they are at."""
        for worker in [*self.workers]:
            self._dismiss(worker)

    def _start(self) -> None:
        worker = self.make.remote(self.kit)
        self.workers.append(worker)
        self.given[worker.begin.remote()] = (worker, ())

    def _dismiss(self, worker: Any) -> None:
        self.workers.remove(worker)
        self.ray.kill(worker)

    def _next(self) -> None:
        """Await an answer, keep its rows, and give its worker something to do."""
        (answer, *_), _ = self.ray.wait([*self.given], num_returns=1)
        worker, errand = self.given.pop(answer)
        try:
            rows = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            self._dismiss(worker)
            self._failed(errand, _reason(error))
            return
        if isinstance(rows, str):
            raise UserError(f"--engine ray: a worker could not go on: {rows}")
        for key, value in rows:
            self.store.put(key, value)
        if errand:
            self._tell(errand)
        self._give(worker)

    def _give(self, worker: Any) -> None:
        """The next errand; without any, the worker goes, so that others may have its place."""
        if not self.errands:
            self._dismiss(worker)
            return
        errand = self.errands.popleft()
        known = known_of(self.plan, errand, self.store)
        self.given[worker.measure.remote(errand, known)] = (worker, errand)

    def _failed(self, errand: Errand, why: str) -> None:
        """An errand is tried again. A worker that could not even begin is not replaced (perhaps too
        many models were on its machine), unless there is no other."""
        self.failures[errand] += 1
        again = self.failures[errand] < TRIES
        if errand and again:
            self.errands.append(errand)
        elif errand:
            self.lost.append(f"{errand[0].method.label}, {errand[0].measure} ({why})")
        elif not self.given and not again:
            raise UserError(f"--engine ray: no worker of the cluster could begin: {why}")
        if self.errands and (errand or not self.given):
            self._start()

    def _tell(self, errand: Errand) -> None:
        news = self.progress.after(errand)
        if news is not None:
            self.watch(news)


class _Progress(Work):
    """How much is done, in whatever order."""

    def __init__(self, plan: Plan, tasks: Sequence[Task]) -> None:
        super().__init__(plan, tasks)
        self.plan, self.done = plan, set[Task]()

    def after(self, errand: Errand) -> News | None:
        """The news when this too is done, if anything is left."""
        self.done |= {*errand}
        self.tasks = sorted(self.tasks, key=lambda task: task not in self.done)
        self.each = [work(self.plan, task) for task in self.tasks]
        return self.news(len(self.done)) if len(self.done) < len(self.tasks) else None


def _room(has: Mapping[str, float], prepared: Prepared, gpus: int) -> int:
    """How many workers the cluster has room for: a GPU each, or a CPU and memory for the model."""
    if gpus and not has.get("GPU"):
        raise UserError(
            "--engine ray: the model is on cuda, but the cluster has no GPU: start its machines "
            "with --num-gpus, or add --device cpu."
        )
    if gpus:
        return int(has["GPU"])
    size = sum(p.numel() * p.element_size() for p in prepared.bench.model.parameters())
    memory = has.get("memory", math.inf)
    return max(1, int(min(has.get("CPU", 1) / CPUS, memory / (ROOM * size))))


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to a cluster that is there: the one of this process, of RAY_ADDRESS, or of
    this machine."""
    ray = _library()
    if ray.is_initialized():
        yield ray
        return
    where = os.environ.get("RAY_ADDRESS") or _noted() or "auto"
    try:
        _knock(where)
        ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--engine ray: there is no Ray cluster to be reached at {shown(where)} "
            f"({_reason(error)}): start one with `ray start --head`, or set RAY_ADDRESS."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _noted() -> str:
    """The address that `ray start` left on this machine; it stays when a cluster breaks down."""
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = Path(base) / "ray" / "ray_current_cluster"
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def _knock(where: str) -> None:
    """Raise at once where nobody answers at host:port: Ray itself would try for minutes."""
    if match := re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", where):
        socket.create_connection((match[1], int(match[2])), timeout=PATIENCE).close()


def _library() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError(
            "--engine ray needs Ray, which is not installed: `pip install 'longitude[ray]'`."
        ) from None


def _reason(error: Exception) -> str:
    """What an error says, in a line: Ray's own are long, and tell the cause somewhere."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"[\w.]*(Error|Exception|UserError)\b", line)]
    told = [*lines[:1], *causes][-1] if lines else type(error).__name__
    return short(told.split(". ")[0].rstrip("."), 120)
