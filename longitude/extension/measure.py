"""Tasks become rows: the model is patched, the metric measured, the numbers recorded.

Out of memory is a result, too: the row says so, and the rest goes on. Where one forward at the
greatest length gives the numbers of every shorter one, a shorter forward is made only if that
failed. `measure` is the measurement that `extend` and `tune` share: some methods on one loaded
model.

For a time budget the machine is timed first, then the plan is cut to fit, in an order that keeps
the comparison intact as long as possible: questions per cell, lengths at which they are asked,
costs, documents, and methods last, never the baseline. What was left out is reported.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from longitude.core.progress import Event, Progress, silent
from longitude.core.store import Row, Store, address
from longitude.core.validate import UserError, shown
from longitude.eval.documents import Document
from longitude.eval.perplexity import is_out_of_memory, losses
from longitude.eval.records import KIND, LOSS, Measurement, ResultKey, from_row
from longitude.eval.tasks import EvalProtocol, Session, Value, measured_by
from longitude.extension.plan import Method, Plan, Prepared, TargetModel, Task
from longitude.hf.patch import patched

Record = Callable[[ResultKey, Value], None]
OVERHEAD = 1.3  # of a scheme on our attention over the plain model
ANSWER_TOKENS = 12  # about
COST_FORWARDS = 6  # of a method and of the baseline, in alternating rounds
SPARE = 0.9  # of the budget that is planned for
MIN_METHODS = 4


@dataclass(frozen=True, eq=False)
class MeasureOptions:
    """On which documents, at which lengths and by which protocol methods are measured."""

    documents: Sequence[Document]
    lengths: tuple[int, ...]
    protocol: EvalProtocol
    seed: int = 0


def measure(
    target: TargetModel,
    methods: Sequence[Method],
    options: MeasureOptions,
    store: Store,
    progress: Progress = silent,
) -> list[Measurement]:
    """Measure what the store lacks of these methods on a loaded model; all their rows."""
    texts = tuple(d.text for d in options.documents)
    plan = Plan(
        target.subject, tuple(methods), options.lengths, texts, options.protocol, options.seed
    )
    run_tasks(Evaluator(plan, target, options.documents), missing(plan, store), store, progress)
    return measurements(plan, store)


class Evaluator:
    """Runs the tasks of a plan on a loaded model."""

    def __init__(self, plan: Plan, target: TargetModel, documents: Sequence[Document]) -> None:
        self.plan, self.target = plan, target
        self.session = Session(target.model, target.tokenizer, documents)
        device = next(target.model.parameters()).device
        self.machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            self.machine = torch.cuda.get_device_name(device)

    def run(self, task: Task, record: Record) -> None:
        """Measure a task and hand over each row as soon as it is known: the longest first, and at
        each length the loss before the context, which scores the same tokens."""
        order = {key: measured_by(key).order for key in {k.measure for k in self.plan.keys(task)}}
        keys = sorted(self.plan.keys(task), key=lambda k: (-k.length, order[k.measure]))
        for _, group in groupby(keys, key=lambda k: (k.length, k.measure)):
            together = [*group]
            values = self.values(task.method, together)
            if values[0]["refused"] and measured_by(together[0].measure).covers_shorter:
                self._record_shorter(task.method, together[0], record)
            for key, value in zip(together, values, strict=True):
                record(key, value)

    def _record_shorter(self, method: Method, key: ResultKey, record: Record) -> None:
        """The numbers at the greatest length that is possible, in place of one that failed."""
        shorter = () if method.by_length else self.plan.lengths[:-1]
        for length in reversed(shorter):
            within = {**key.protocol, "lengths": [n for n in self.plan.lengths if n <= length]}
            less = replace(key, length=length, protocol=within)
            (value,) = self.values(method, [less])
            if not value["refused"]:
                record(less, value)
                return

    def values(self, method: Method, keys: Sequence[ResultKey]) -> list[Value]:
        """The values of rows of one metric and length, or the sentence why there are none."""
        start, length = time.perf_counter(), keys[0].length
        values: Sequence[Value] = []
        try:
            with self._applied(method, length):
                values = measured_by(keys[0].measure).measure(self.session, keys)
        except UserError as error:
            values = [{"refused": str(error)}] * len(keys)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if not values:  # after the exception, which would keep tensors alive
            values = [{"refused": f"out of memory at {length} tokens."}] * len(keys)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        seconds = (time.perf_counter() - start) / len(keys)
        return [self.row(method, value, seconds) for value in values]

    def row(self, method: Method, value: Value, seconds: float = 0.0) -> Value:
        """Numbers with what every row has beside them."""
        common = {"label": method.label, "refused": None, "machine": self.machine}
        return {**common, **value, "seconds": round(seconds, 4)}

    @contextmanager
    def _applied(self, method: Method, length: int) -> Iterator[None]:
        """The model under a method; the session can leave it for the baseline and come back."""
        subject, model, patches = self.plan.subject, self.target.model, ExitStack()
        too_long = subject.family == "learned" and length > subject.trained
        if too_long and method.patch is None:  # on a GPU the lookup would end the process
            raise UserError(f"its table has no position beyond {subject.trained}.")

        def apply() -> None:
            if method.patch is not None:
                total = length if method.by_length else None
                patches.enter_context(patched(model, method.patch, length=total, check=False))

        @contextmanager
        def baseline() -> Iterator[None]:
            patches.close()
            try:
                yield
            finally:
                apply()

        self.session.baseline = None if too_long or method.patch is None else baseline
        with patches:
            apply()
            yield


def missing(plan: Plan, store: Store) -> list[Task]:
    """The tasks of a plan that the store lacks a row of."""
    return [
        task
        for task in plan.tasks()
        if any(store.get(key.to_json()) is None for key in plan.keys(task))
    ]


def measurements(plan: Plan, store: Store) -> list[Measurement]:
    """The recorded rows of a plan, and those of shorter lengths that replace a refused one."""
    wanted = [key.to_json() for task in plan.tasks() for key in plan.keys(task)]
    rows = [from_row(Row(key, value, "")) for key in wanted if (value := store.get(key))]
    if any(row.refused and row.key.measure == LOSS for row in rows):
        schemes, known = {m.scheme for m in plan.methods}, {address(key) for key in wanted}
        for other in store.rows(kind=KIND, measure=LOSS):
            row = from_row(other)
            mine = row.key.subject == plan.subject and row.key.text in plan.texts
            if mine and row.key.scheme in schemes and address(other.key) not in known:
                rows.append(row)
    return rows


def run_tasks(
    evaluator: Evaluator, tasks: Sequence[Task], store: Store, progress: Progress = silent
) -> None:
    """Run tasks one after another in this process."""
    work, start = [TYPICAL.task(evaluator.plan, task) for task in tasks], time.monotonic()
    for index, task in enumerate(tasks):
        done, left = sum(work[:index]), sum(work[index:])
        seconds = (time.monotonic() - start) * left / done if done else None
        progress(Event(str(task), index, len(tasks), "measure", seconds_left=seconds))
        run_task(evaluator, task, store)


def run_task(evaluator: Evaluator, task: Task, store: Store) -> None:
    """Measure one task. A method that answered nothing at the length before is not asked at a
    longer one: its answers count as wrong."""
    plan = evaluator.plan
    before = [t for t in plan.tasks_of(task.method, task.measure) if t.length < task.length][-1:]
    rows = [store.get(key.to_json()) for t in before for key in plan.keys(t)]
    answers = [one for row in rows for one in (row or {}).get("right", [True])]
    if not answers or any(answers):
        return evaluator.run(task, lambda key, value: store.put(key.to_json(), value))
    why = f"none of {len(answers)} retrieved at {before[0].length}."
    for key in plan.keys(task):
        wrong = {"right": [False] * key.protocol["questions"], "assumed": why}
        store.put(key.to_json(), evaluator.row(task.method, wrong))
    return None


# time


@dataclass(frozen=True)
class Pace:
    """Seconds of one forward, a·n + b·n²; and of one decoded token."""

    linear: float
    quadratic: float
    token: float

    def forward(self, n: int) -> float:
        return self.linear * n + self.quadratic * n * n

    def task(self, plan: Plan, task: Task) -> float:
        """Seconds of a task."""
        if task.document is not None:
            lengths = sorted(key.length for key in plan.keys(task))
            return OVERHEAD * sum(map(self.forward, lengths[: -1 if len(lengths) > 1 else None]))
        one, protocol = self.forward(task.length), plan.protocol
        if not measured_by(task.measure).selectable:
            return OVERHEAD * (COST_FORWARDS * one + protocol.new_tokens * self.token)
        questions = protocol.questions * len(protocol.depths)
        return OVERHEAD * questions * (one + ANSWER_TOKENS * self.token)

    def plan(self, plan: Plan) -> float:
        return sum(self.task(plan, task) for task in plan.tasks())


TYPICAL = Pace(1.0, 1 / 16384, 1.0)  # in units of one token's time: what progress goes by


def parse_seconds(text: str) -> float:
    """A time: 90s, 10m, 2h, or seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--budget takes a time, but got {shown(text)}: write 90s, 10m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def time_model(prepared: Prepared) -> Pace:
    """Time the model on this machine."""
    model, subject = prepared.target.model, prepared.plan.subject
    ids = prepared.documents[0].ids

    def timed(tokens: int) -> float:
        """The faster of two runs, after one that does not count."""
        runs = []
        for _ in range(3):
            start = time.perf_counter()
            losses(model, ids[: tokens + 1])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            runs.append(time.perf_counter() - start)
        return min(runs[1:])

    near, far = max(64, subject.trained // 4), subject.trained
    short, long = timed(near), timed(far)
    quadratic = max(0.0, (long / far - short / near) / (far - near)) if far > near else 0.0
    return Pace(max(1e-9, long / far - quadratic * far), quadratic, timed(2))


def fit_budget(plan: Plan, pace: Pace, budget: float) -> tuple[Plan, list[str]]:
    """The plan cut down until it fits, and what was left out."""
    room, notes = budget * SPARE, []
    for smaller, note in _cuts(plan):
        if pace.plan(plan) <= room:
            break
        plan, notes = smaller(plan), [*notes, note]
    need = pace.plan(plan)
    if need > room:
        notes.append(f"even so it takes about {need:,.0f} s, more than the {budget:,.0f} s given")
    return plan, list(dict.fromkeys(notes))


def _cuts(plan: Plan) -> Iterator[tuple[Callable[[Plan], Plan], str]]:
    """Ways to make a plan smaller, one after another, with what each leaves out."""
    for count in (2, 1):
        if plan.protocol.questions > count:
            yield _protocol(questions=count), f"{count} questions per cell instead of more"
    ends = (plan.lengths[0], plan.target)
    yield _field(question_lengths=ends), f"questions at {ends[0]:,} and {ends[1]:,} only"
    yield _protocol(depths=(0.0, 0.5, 1.0)), "questions at three depths instead of five"
    if plan.protocol.cost:
        yield _protocol(cost=False), "no cost"
    for count in range(len(plan.texts) - 1, 1, -1):
        yield _field(texts=plan.texts[:count]), f"{count} documents instead of {len(plan.texts)}"
    if plan.protocol.tasks:
        yield _protocol(tasks=()), "no questions"
    for count in range(len(plan.methods) - 1, MIN_METHODS - 1, -1):
        gone = ", ".join(m.label for m in plan.methods[count:])
        yield _field(methods=plan.methods[:count]), f"without {gone}"
    if len(plan.texts) > 1:
        yield _field(texts=plan.texts[:1]), "one document: no difference is significant"


def _field(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **changes)


def _protocol(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, protocol=replace(plan.protocol, **changes))
