"""Run a plan on an existing Ray cluster (Moritz et al. 2018, arXiv:1712.05889).

Each worker is an actor with a CPU, and a GPU if the model is on one: an actor rather than a task,
so that the model is loaded once and keeps its GPU. A worker gets a group of tasks at once: a method
on one document, or all lengths of one metric. Only this process writes rows. A group that fails
goes to a fresh worker, since a killed process or a broken GPU can't run any more tasks.

If N ranks share a text, a worker is N actors in a placement group, on one machine if one has room.
They form a process group and share the tokens of each text (ranks.py): the first receives tasks,
as a single worker would, and the others follow it. They are stopped together.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longitude.core.progress import Event, Progress
from longitude.core.store import Store
from longitude.core.validate import UserError, short, shown
from longitude.eval.documents import Document
from longitude.eval.prefill import lm_head
from longitude.eval.records import Text
from longitude.extension.measure import Evaluator
from longitude.extension.plan import Plan, Prepared, TargetModel, Task
from longitude.extension.ranks import RankEvaluator, follow
from longitude.hf.loading import digest, load
from longitude.hf.source import TINY, find
from longitude.ops.shards import RankLost

TRIES = 4  # attempts to run a group of tasks, and to start a worker
CONNECT_TIMEOUT = 10.0  # seconds
JOINING = timedelta(seconds=60)
MODEL_COPIES = 2  # memory of a worker on a CPU, in sizes of the model
CPUS = 1  # CPUs, and threads, of a worker

Group = tuple[Task, ...]
Pair = tuple[dict[str, Any], dict[str, Any]]  # a row's key and value


# in a worker


@dataclass(frozen=True)
class WorkerSpec:
    """What every worker receives: plain values, so that it measures what this process would."""

    model: str  # a name, or an absolute path: workers have other working directories
    revision: str | None
    trust_remote_code: bool
    plan: Plan
    documents: tuple[tuple[Text, list[int], int], ...]

    @classmethod
    def of(cls, prepared: Prepared) -> WorkerSpec:
        options, name = prepared.options, prepared.plan.subject.name
        source = find(name, options.revision)
        local = source.gguf or (source.folder if source.name not in TINY else None)
        documents = tuple((d.text, d.ids.tolist(), d.special) for d in prepared.documents)
        model = str(local.resolve()) if local else source.name
        return cls(model, options.revision, options.trust_remote_code, prepared.plan, documents)


class Worker:
    """One process of the cluster. A user error is returned as a message, since a retry would not
    help; any other failure is raised."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec, self.group = spec, None

    @cached_property
    def target(self) -> TargetModel:
        """The model, loaded here; raises unless it is the one that was planned for."""
        torch.set_num_threads(CPUS)
        spec, subject = self.spec, self.spec.plan.subject
        model, tokenizer = load(
            spec.model,
            device=subject.device,
            dtype=subject.dtype,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            quiet=True,
        )
        if (weights := digest(model)) != subject.weights:
            raise UserError(
                f"{subject.name} has other weights here ({weights}) than where the run began "
                f"({subject.weights}): give every machine of the cluster the same files."
            )
        return TargetModel(model, tokenizer, subject)

    @cached_property
    def evaluator(self) -> Evaluator:
        spec = self.spec
        documents = [Document(text, torch.tensor(ids), n) for text, ids, n in spec.documents]
        about = (spec.plan, self.target, documents)
        return Evaluator(*about) if self.group is None else RankEvaluator(*about, self.group)

    def load(self) -> str:
        """Load the model; return why it can't be used here, or an empty string."""
        try:
            lm_head(self.target.model)  # verified on a few tokens in one process
        except UserError as error:
            return str(error)
        return ""

    def begin(self, others: Sequence[Any] = ()) -> list[Pair] | str:
        """Load the model; the first of several ranks then forms a process group with the others."""
        ray = importlib.import_module("ray") if others else None
        loading = [actor.load.remote() for actor in others]
        if reasons := [why for why in (self.load(), *(ray.get(loading) if ray else ())) if why]:
            return reasons[0]
        if ray:
            with socket.socket() as probe:
                probe.bind(("", 0))
                address = (ray.util.get_node_ip_address(), probe.getsockname()[1])
            for rank, actor in enumerate(others, 1):
                actor.follow.remote(address, rank, len(others) + 1)
            self.join(address, 0, len(others) + 1)
        return []

    def join(self, where: tuple[str, int], rank: int, size: int) -> None:
        """Form a process group; by default torch waits half an hour for a rank that has died."""
        backend = "nccl" if self.spec.plan.subject.device == "cuda" else "gloo"
        ends = (*where, size, rank == 0)
        store = dist.TCPStore(*ends, timeout=JOINING)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        self.group = dist.group.WORLD

    def follow(self, where: tuple[str, int], rank: int, size: int) -> None:
        """Measure what the first rank does, for as long as this process lives."""
        self.join(where, rank, size)
        follow(self.target.model, self.group, [self.evaluator])

    def measure(self, group: Group) -> list[Pair] | str:
        rows: list[Pair] = []
        try:
            evaluator = self.evaluator
            for task in group:
                evaluator.run(task, lambda key, value: rows.append((key.to_json(), value)))
        except RankLost:  # fresh ranks may succeed
            raise
        except UserError as error:
            return str(error)
        return rows


# in this process


def groups(tasks: Sequence[Task]) -> list[Group]:
    """Group the tasks that one worker gets at once, shorter lengths before longer ones."""
    together: dict[Any, list[Task]] = {}
    for task in tasks:
        together.setdefault((task.method, task.measure, task.document), []).append(task)
    return [tuple(sorted(group, key=lambda task: task.length)) for group in together.values()]


def run_on_ray(prepared: Prepared, tasks: Sequence[Task], store: Store, progress: Progress) -> None:
    """Run these tasks on the cluster and record their rows as they arrive."""
    if not tasks:
        return
    # Ray prints what happens to its workers, and standard output is for data
    with redirect_stdout(sys.stderr), _cluster() as ray:
        run = _Run(ray, prepared, tasks, store, progress)
        try:
            run.all()
        finally:  # also on Ctrl-C
            for worker in [*run.workers]:
                run.dismiss(worker)


class _Placed(NamedTuple):
    """A worker: the actor that receives tasks, and the placement group of its ranks."""

    actor: Any
    place: Any = None  # None for a single rank


class _Run:
    """Groups of tasks handed one by one to whichever worker is free."""

    def __init__(
        self, ray: Any, prepared: Prepared, tasks: Sequence[Task], store: Store, progress: Progress
    ) -> None:
        self.ray, self.store, self.progress = ray, store, progress
        self.waiting = deque(groups(tasks))
        self.total, self.done = len(tasks), 0
        self.pending: dict[Any, tuple[_Placed, Group]] = {}  # future: its worker and tasks
        self.workers: list[_Placed] = []
        self.failures: Counter[Group] = Counter()
        self.lost: list[str] = []
        self.gpus, self.ranks = _gpus(prepared), prepared.ranks
        room, self.strategy = _room(ray, prepared)
        self.size = min(len(self.waiting), room)
        self.worker = ray.remote(Worker)
        self.spec = ray.put(WorkerSpec.of(prepared))

    def all(self) -> None:
        self._report(self.waiting[0])
        for _ in range(self.size):
            self._start()
        while self.waiting or any(group for _, group in self.pending.values()):
            self._next()
        if self.lost:
            raise UserError(
                f"--engine ray: {len(self.lost)} groups of tasks failed {TRIES} times, first "
                f"{self.lost[0]}; all others are recorded, and the same command tries again."
            )

    def dismiss(self, worker: _Placed) -> None:
        self.workers.remove(worker)
        self.ray.kill(worker.actor)
        if worker.place is not None:
            self.ray.util.remove_placement_group(worker.place)  # which ends its other ranks

    def _report(self, group: Group) -> None:
        self.progress(Event(str(group[0]), self.done, self.total, job="measure"))

    def _start(self) -> None:
        needs = {"num_cpus": CPUS, "num_gpus": self.gpus}
        if self.ranks == 1:
            worker = _Placed(self.worker.options(**needs).remote(self.spec))
            began = worker.actor.begin.remote()
        else:
            bundles = [{"CPU": CPUS, **({"GPU": 1} if self.gpus else {})}] * self.ranks
            place = self.ray.util.placement_group(bundles, strategy=self.strategy)
            module = importlib.import_module("ray.util.scheduling_strategies")
            at = [module.PlacementGroupSchedulingStrategy(place, n) for n in range(self.ranks)]
            actors = [self.worker.options(**needs, scheduling_strategy=strategy) for strategy in at]
            first, *others = [actor.remote(self.spec) for actor in actors]
            worker, began = _Placed(first, place), first.begin.remote(others)
        self.workers.append(worker)
        self.pending[began] = (worker, ())

    def _next(self) -> None:
        """Await one answer, record its rows, and give its worker the next group. If no group is
        left, dismiss the worker to free its resources."""
        (answer, *_), _ = self.ray.wait([*self.pending], num_returns=1)
        worker, group = self.pending.pop(answer)
        try:
            rows = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            self.dismiss(worker)
            self._failed(group, _reason(error))
            return
        if isinstance(rows, str):
            raise UserError(f"--engine ray: a worker could not go on: {rows}")
        for key, value in rows:
            self.store.put(key, value)
        self.done += len(group)
        if not self.waiting:
            return self.dismiss(worker)
        if group:
            self._report(group)
        group = self.waiting.popleft()
        self.pending[worker.actor.measure.remote(group)] = (worker, group)
        return None

    def _failed(self, group: Group, why: str) -> None:
        """Retry the failed group. A worker that failed to start is not replaced, unless there is no
        other: its machine may have held too many models."""
        self.failures[group] += 1
        retry = self.failures[group] < TRIES
        if group and retry:
            self.waiting.append(group)
        elif group:
            self.lost.append(f"{group[0].method.label}, {group[0].measure} ({why})")
        elif not self.pending and not retry:
            raise UserError(f"--engine ray: no worker of the cluster could begin: {why}")
        if self.waiting and (group or not self.pending):
            self._start()


def _gpus(prepared: Prepared) -> int:
    """The number of GPUs of each actor."""
    return int(prepared.plan.subject.device == "cuda")


def _room(ray: Any, prepared: Prepared) -> tuple[int, str]:
    """How many workers the cluster has room for, and the placement strategy for the ranks of each:
    on one machine, if any has room for them."""
    ranks = prepared.ranks
    total = _actors(ray.cluster_resources(), prepared)
    if _gpus(prepared) and not total:
        raise UserError(
            "--engine ray: the model is on cuda, but the cluster has no GPU: start its machines "
            "with --num-gpus, or add --device cpu."
        )
    if ranks == 1:
        return max(1, total), ""
    if total < ranks:
        needs = "a GPU" if _gpus(prepared) else "a CPU and memory for the model"
        raise UserError(
            f"--context-parallel {ranks} needs {needs} for each rank, but the cluster has room for "
            f"{total}: give fewer, or start more machines."
        )
    machines = [_actors(node["Resources"], prepared) for node in ray.nodes() if node["Alive"]]
    packed = sum(room // ranks for room in machines)
    return (packed, "STRICT_PACK") if packed else (total // ranks, "PACK")


def room(prepared: Prepared) -> int:
    """How many ranks the cluster has room for."""
    with redirect_stdout(sys.stderr), _cluster() as ray:
        return max(1, _actors(ray.cluster_resources(), prepared))


def _actors(has: dict[str, float], prepared: Prepared) -> int:
    """How many actors these resources are enough for: a GPU each, or a CPU and memory for the
    model."""
    if _gpus(prepared):
        return int(has.get("GPU", 0))
    size = sum(p.numel() * p.element_size() for p in prepared.target.model.parameters())
    memory = has.get("memory", math.inf)
    return int(min(has.get("CPU", 0) / CPUS, memory / (MODEL_COPIES * size)))


@contextmanager
def _cluster() -> Iterator[Any]:
    """Ray, connected to a running cluster: that of this process, of RAY_ADDRESS, or of this
    machine."""
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise UserError(
            "--engine ray needs Ray, which is not installed: `pip install 'longitude[ray]'`."
        ) from None
    if ray.is_initialized():
        yield ray
        return
    # `ray start` writes its address to a file that remains when the cluster breaks down
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    address_file = Path(base) / "ray" / "ray_current_cluster"
    written = address_file.read_text(encoding="utf-8").strip() if address_file.is_file() else ""
    address = os.environ.get("RAY_ADDRESS") or written or "auto"
    try:
        # fail at once if nothing listens at host:port: Ray itself would try for minutes
        if match := re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d+)", address):
            socket.create_connection((match[1], int(match[2])), timeout=CONNECT_TIMEOUT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--engine ray: there is no Ray cluster to be reached at {shown(address)} "
            f"({_reason(error)}): start one with `ray start --head`, or set RAY_ADDRESS."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _reason(error: Exception) -> str:
    """The cause of an error in one line: Ray's messages are long and name it somewhere inside."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"[\w.]*(Error|Exception|UserError)\b", line)]
    cause = [*lines[:1], *causes][-1] if lines else type(error).__name__
    return short(cause.split(". ")[0].rstrip("."), 120)
