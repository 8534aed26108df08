"""Run tasks: patch the model, measure the metric, record the rows.

Out of memory is a result, too: the row says so, and the run continues. If one forward at the
greatest length gives the numbers of all shorter ones, a shorter forward runs only if that one
failed. The operations of a small model are too short to be split over the cores of a CPU: there
each core runs a separate task, on a copy of the model that shares its weights. Cost tasks run one
at a time on all cores.

Documents are spent where they decide (successive elimination): all methods read those of the first
round; each further round keeps only methods that may still turn out to be the best, until one
stands out or the documents run out. A time budget bounds the wall clock: tasks that would not fit,
by the time of a short forward, are skipped and reported, and a forward that runs over is aborted.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from longitude.core.progress import Event, Progress, silent
from longitude.core.store import Row, Store, address
from longitude.core.validate import UserError
from longitude.eval.documents import Document
from longitude.eval.perplexity import is_out_of_memory, losses
from longitude.eval.prefill import input_device, text_config
from longitude.eval.records import (
    CONTEXT,
    COST,
    KEPT,
    KIND,
    LOSS,
    RETRIEVAL,
    Measurement,
    ResultKey,
    from_row,
    of,
)
from longitude.eval.tables import SANE
from longitude.eval.tasks import Session, Value, measured_by
from longitude.extension.plan import Method, Plan, Prepared, TargetModel, Task
from longitude.extension.rank import Ranking
from longitude.hf.patch import patch_of, patched
from longitude.ops.shards import RankLost

Record = Callable[[ResultKey, Value], None]
Run = Callable[[Sequence[Task]], None]  # measures tasks and records their rows
OVERHEAD = 1.3  # time of a scheme on our attention, relative to the plain model
COST_FORWARDS = 6  # of a cost task: method and baseline alternate
TEXTS_PER_PROMPT = 5  # approximate: families that hide facts share a text
SPARE = 0.9  # share of the budget for measuring: the report takes time, too
CALIBRATION = {"cpu": 256, "cuda": 4096}  # tokens: on a GPU fewer take as long
MAX_TIMED, TIMING = 11, 3.0  # limits of a time estimate, in forwards and in seconds
CLEARLY = 1.5  # times SANE: the bound if a loss is known from a single document
SMALL_MODEL = 2**26  # bytes of weights
MAX_WORKERS = 4  # each needs memory for its activations
MEANINGLESS = "its loss there is so high that nothing else about it matters."


class Evaluator:
    """Runs the tasks of a plan on a loaded model."""

    def __init__(self, plan: Plan, target: TargetModel, documents: Sequence[Document]) -> None:
        self.plan, self.target = plan, target
        self.session = Session(target.model, target.tokenizer, documents)
        device = next(target.model.parameters()).device
        self.machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            self.machine = torch.cuda.get_device_name(device)

    @cached_property
    def workers(self) -> list[Evaluator]:
        """Evaluators that may run concurrently: this one, and copies if one core each is faster."""
        model, target = self.target.model, self.target
        weights = {id(p): p for p in model.parameters()}
        small = sum(p.nbytes for p in weights.values()) <= SMALL_MODEL and patch_of(model) is None
        on_cpu = all(p.device.type == "cpu" for p in weights.values())
        count = min(torch.get_num_threads(), MAX_WORKERS) if small and on_cpu else 1
        clones = [replace(target, model=deepcopy(model, {**weights})) for _ in range(1, count)]
        return [self, *(Evaluator(self.plan, clone, self.session.documents) for clone in clones)]

    def run(self, task: Task, record: Record) -> None:
        """Measure a task and record each row as soon as it is known. Longer lengths come first, and
        at each length the loss precedes the context, which scores the same tokens."""
        keys = sorted(self.plan.keys(task), key=lambda k: (-k.length, measured_by(k.measure).order))
        for _, group in groupby(keys, key=lambda key: (key.length, key.measure)):
            same_metric = [*group]
            values = self.values(task.method, same_metric)
            if values[0]["refused"] and measured_by(same_metric[0].measure).covers_shorter:
                self._record_shorter(task.method, same_metric[0], record)
            for key, value in zip(same_metric, values, strict=True):
                record(key, value)

    def _record_shorter(self, method: Method, key: ResultKey, record: Record) -> None:
        """After the forward that covers all lengths has failed, record the longest that works."""
        shorter_lengths = () if method.by_length else self.plan.lengths[:-1]
        for length in reversed(shorter_lengths):
            protocol = {**key.protocol, "lengths": [n for n in self.plan.lengths if n <= length]}
            shorter_key = replace(key, length=length, protocol=protocol)
            (value,) = self.values(method, [shorter_key])
            if not value["refused"]:
                record(shorter_key, value)
                return

    def values(self, method: Method, keys: Sequence[ResultKey]) -> list[Value]:
        """Measure rows of one metric and length; a failed row holds the reason as `refused`."""
        start, length = time.perf_counter(), keys[0].length
        values: Sequence[Value] = []
        try:
            with self._applied(method, length):
                values = measured_by(keys[0].measure).measure(self.session, keys)
        except RankLost:
            raise
        except UserError as error:
            values = [{"refused": str(error)}] * len(keys)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if not values:  # outside the handler: the exception would keep tensors alive
            values = [{"refused": self.out_of_memory(length)}] * len(keys)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        seconds = (time.perf_counter() - start) / len(keys)
        return [self.row(method, value, seconds) for value in values]

    def out_of_memory(self, length: int) -> str:
        """The message of a row for which memory ran out."""
        return f"out of memory at {length} tokens."

    def row(self, method: Method, value: Value, seconds: float = 0.0) -> Value:
        """Add the fields that every row has to a metric's numbers."""
        common = {"label": method.label, "refused": None, "machine": self.machine}
        return {**common, **value, "seconds": round(seconds, 4)}

    @contextmanager
    def _applied(self, method: Method, length: int) -> Iterator[None]:
        """Patch the model with a method; `session.baseline` switches to the baseline and back."""
        subject, patches = self.target.subject, ExitStack()
        total = length if method.by_length else None
        too_long = subject.family == "learned" and length > subject.trained
        if too_long and method.patch is None:  # on a GPU the lookup would kill the process
            raise UserError(f"its table has no position beyond {subject.trained}.")

        @contextmanager
        def baseline() -> Iterator[None]:
            patches.close()
            try:
                with self.patched(None):
                    yield
            finally:
                patches.enter_context(self.patched(method.patch, total))

        self.session.baseline, self.session.baseline_reaches = baseline, not too_long
        self.session.is_baseline = method.patch is None
        with patches:
            patches.enter_context(self.patched(method.patch, total))
            yield

    def patched(self, scheme: str | None, length: int | None = None) -> AbstractContextManager[Any]:
        """Patch the model with a scheme; None leaves it as the baseline."""
        if scheme is None:
            return nullcontext()
        return patched(self.target.model, scheme, length=length, check=False)


def missing(plan: Plan, tasks: Sequence[Task], store: Store) -> list[Task]:
    """The tasks with a row that is missing from the store."""
    return [t for t in tasks if any(store.get(key.to_json()) is None for key in plan.keys(t))]


def measurements(plan: Plan, store: Store) -> list[Measurement]:
    """The recorded rows of a plan, and rows of shorter lengths that replace refused ones."""
    planned = [key.to_json() for task in plan.all_tasks() for key in plan.keys(task)]
    rows = [from_row(Row(key, value, "")) for key in planned if (value := store.get(key))]
    if any(row.refused and row.key.measure == LOSS for row in rows):
        schemes, addresses = {m.scheme for m in plan.methods}, {address(key) for key in planned}
        for stored in store.rows(kind=KIND, measure=LOSS):
            row = from_row(stored)
            in_plan = row.key.subject == plan.subject and row.key.text in plan.texts
            if in_plan and row.key.scheme in schemes and address(stored.key) not in addresses:
                rows.append(row)
    return rows


def run_rounds(plan: Plan, store: Store, goal: str, run: Run, budgeted: bool = False) -> str:
    """Run every round for the methods still in the race; return why it ended. Losses come first,
    since they tell which tasks to skip. Under a budget, tasks that do not decide come last."""
    race, later, ended, rounds = plan.methods, list[Task](), "", plan.protocol.rounds
    for round in range(rounds):
        tasks = plan.tasks(round, race)
        if budgeted:
            later += [task for task in tasks if not plan.decides(task)]
            tasks = [task for task in tasks if plan.decides(task)]
        run(missing(plan, [task for task in tasks if task.document is not None], store))
        run([*left_to_run(plan, tasks, store)])
        # a resumed run may have rows of later rounds: it must decide as if it had none
        rows = [r for r in measurements(plan, store) if r.key.at.get("round", 0) <= round]
        rows = [row for row in rows if row.key.measure != COST]
        if not rows:
            break
        ranking = Ranking(rows, plan.target)
        names = ranking.in_race(goal)
        race = tuple(m for m in plan.methods if m.label in names)
        others = [m.label for m in race if m.patch is not None]
        decided = not others or others == ranking.ordered(goal)[:1]
        if decided and round < rounds - 1:
            why = f"{others[0]} stands out" if others else "no method is left in the race"
            ended = f"Ended after round {round + 1} of {rounds}: {why} (95 %)."
            later += plan.tasks(rounds - 1, ())  # costs
            break
    run([*left_to_run(plan, sorted(later, key=lambda task: task.document is None), store)])
    left = ", ".join(m.label for m in race if m.patch is not None) or "none"
    return ended or f"Ended with the last of {rounds} rounds; still in the race: {left}."


def left_to_run(plan: Plan, tasks: Sequence[Task], store: Store) -> Iterator[Task]:
    """Yield the tasks with missing rows, but refuse those that nobody would act on: kept context,
    retrieval and cost of a method whose loss is not sane (one document: above CLEARLY · SANE)."""
    rows = [row for row in of(measurements(plan, store), CONTEXT) if not row.refused]
    losses = {(r.key.scheme, r.key.length, r.key.text): r.value["loss"] for r in rows}
    excess_by_length: dict[tuple[str, int], list[float]] = {}
    for (scheme, length, text), loss in losses.items():
        window = losses.get((plan.subject.scheme, plan.subject.trained, text))
        if window is not None:
            excess_by_length.setdefault((scheme, length), []).append(loss - window)
    for task in tasks:
        keys = [key.to_json() for key in plan.keys(task)]
        gated = measured_by(task.measure).repeated or (task.measure == COST and task.method.patch)
        excesses = excess_by_length.get((task.method.scheme, task.length), [0.0])
        refused = {"label": task.method.label, "refused": MEANINGLESS, "seconds": 0.0}
        if gated and fmean(excesses) > SANE * (1 if len(excesses) > 1 else CLEARLY):
            for key in (key for key in keys if store.get(key) is None):
                store.put(key, refused)
        elif any(store.get(key) in (None, refused) for key in keys):  # refused on fewer losses
            yield task


def run_tasks(
    evaluator: Evaluator,
    tasks: Sequence[Task],
    store: Store,
    progress: Progress = silent,
    clock: Clock | None = None,
) -> None:
    """Run tasks in this process; with a clock, only those that fit into its time."""
    work, start, done = {task: TYPICAL.task(evaluator.plan, task) for task in tasks}, None, 0.0
    total = sum(work.values())

    def admitted(tasks: Iterator[Task]) -> Iterator[Task]:
        nonlocal start
        for _, group in groupby(tasks, key=lambda t: (t.measure, t.document, t.length, t.round)):
            batch = [*group]
            for task in batch if clock is None else clock.admit(evaluator.plan, batch):
                start = time.monotonic() if start is None else start
                seconds = (time.monotonic() - start) * (total - done) / done if done else None
                progress(Event(str(task), done, total, "measure", seconds_left=seconds))
                yield task

    with clock.limit() if clock else nullcontext():
        for is_cost, same_kind in groupby(tasks, key=lambda task: task.measure == COST):
            workers = [evaluator] if is_cost else evaluator.workers
            for task in _run_each(workers, admitted(same_kind), store):
                done += work[task]


def _run_each(workers: Sequence[Evaluator], tasks: Iterator[Task], store: Store) -> Iterator[Task]:
    """Run each task on the next free worker, record its rows in this thread, then yield it."""
    if len(workers) == 1:
        for task in tasks:
            workers[0].run(task, lambda key, value: store.put(key.to_json(), value))
            yield task
        return

    def run(worker: Evaluator, task: Task) -> list[tuple[ResultKey, Value]]:
        rows: list[tuple[ResultKey, Value]] = []
        worker.run(task, lambda key, value: rows.append((key, value)))
        return rows

    def start(worker: Evaluator) -> None:
        if (task := next(tasks, None)) is not None:
            running[pool.submit(run, worker, task)] = task, worker

    running: dict[Future[Any], tuple[Task, Evaluator]] = {}
    with _threads(len(workers)) as pool:
        for worker in workers:
            start(worker)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, worker = running.pop(future)
                start(worker)  # the worker continues while the rows are written
                for key, value in future.result():
                    store.put(key.to_json(), value)
                yield task


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that shares the cores. After an error in the block, or Ctrl-C, running forwards
    end at their next layer, since the pool waits for its threads."""

    def end(*_: Any) -> None:
        raise OutOfTime

    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "", torch.set_num_threads, (cores // count,))
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, cores)
        with pool:
            try:
                yield pool
            except BaseException:
                stack.callback(register_module_forward_pre_hook(end).remove)
                raise


# time


@dataclass(frozen=True)
class Pace:
    """The time of one forward over n tokens in seconds: a·n + b·n²."""

    linear: float
    quadratic: float

    def forward(self, n: int) -> float:
        return self.linear * n + self.quadratic * n * n

    def task(self, plan: Plan, task: Task) -> float:
        one_forward, protocol = self.forward(task.length), plan.protocol
        if task.document is not None:
            lengths = sorted(key.length for key in plan.keys(task))
            forwards = sum(map(self.forward, lengths[: -1 if len(lengths) > 1 else None]))
        elif task.measure == KEPT:
            forwards = 2 * protocol.stretches * one_forward
        elif task.measure == RETRIEVAL:
            texts = min(TEXTS_PER_PROMPT, len(protocol.families))
            forwards = protocol.prompts * texts * one_forward
        else:
            forwards = COST_FORWARDS * one_forward + protocol.new_tokens * self.forward(1)
        return OVERHEAD * forwards

    def plan(self, plan: Plan) -> float:
        """Seconds for all tasks of all rounds: an upper bound for a run."""
        return sum(self.task(plan, task) for task in plan.all_tasks())


TYPICAL = Pace(1.0, 1 / 16384)  # in units of one token's time: weighs tasks for the progress bar


class OutOfTime(Exception):
    """A forward was aborted: by the budget, or by an error in another thread."""


@dataclass
class Clock:
    """A time budget: which tasks still fit, and what was left out."""

    deadline: float  # by time.monotonic()
    pace: Pace
    dropped: set[str] = field(default_factory=set)  # labels of methods without time left
    skipped: dict[str, None] = field(default_factory=dict)  # what was not measured, in order

    def admit(self, plan: Plan, group: Sequence[Task]) -> list[Task]:
        """Return the tasks of one kind that fit: those of all methods, or of some."""
        group = [task for task in group if task.method.label not in self.dropped]
        cost = self.pace.task(plan, group[0]) if group else 0.0
        room = int((self.deadline - time.monotonic()) / cost) if cost else len(group)
        if room >= len(group):
            return group
        kinds = Counter()  # alternate remaps and others, so that a short list has both

        def turn(task: Task) -> int:
            kinds["remap=" in task.method.scheme] += 1
            return kinds["remap=" in task.method.scheme]

        group = sorted(group, key=turn)
        # a single method is no comparison; in a later round neither is a part of the methods, which
        # would be known from more documents than the others
        first, room = group[0], 0 if room < 2 or group[0].round else room
        round = f" (round {first.round + 1})" if first.round else ""
        what = str(first).partition(": ")[2] + round
        left_out = [task.method.label for task in group[room:]]
        if not room:
            self.skipped[what] = None
        elif plan.decides(first):
            self.dropped |= {*left_out}
        else:
            self.skipped[f"{what} of {', '.join(left_out)}"] = None
        return group[:room]

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Raise OutOfTime in any forward that runs past the deadline."""

        def check(*_: Any) -> None:
            if time.monotonic() > self.deadline:
                raise OutOfTime

        hook = register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            hook.remove()

    def notes(self, plan: Plan) -> list[str]:
        dropped = ", ".join(m.label for m in plan.methods if m.label in self.dropped)
        return [f"without {dropped}"] * bool(dropped) + [f"no {what}" for what in self.skipped]


def time_model(prepared: Prepared, seconds: float = TIMING) -> Pace:
    """Estimate the pace on this machine in about `seconds`, from the fastest of several short
    forwards after a warm-up, since other processes can only add time. The quadratic part,
    attention, follows from its share of all operations."""
    model = prepared.target.model
    length = min(CALIBRATION.get(input_device(model).type, 256), prepared.plan.subject.trained)
    ids = prepared.documents[0].ids[: length + 1]  # a table of positions may end at the window
    runs = list[float]()
    while len(runs) < 3 or (len(runs) < MAX_TIMED and sum(runs[1:]) < seconds):
        start = time.perf_counter()
        losses(model, ids)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        runs.append(time.perf_counter() - start)
    config = text_config(model)
    weights = sum(p.numel() for p in model.parameters())
    width = config.num_hidden_layers * config.hidden_size
    linear = min(runs[1:]) / len(ids) / (1 + width * len(ids) / weights)
    return Pace(linear, linear * width / weights)
