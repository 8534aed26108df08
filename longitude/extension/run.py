"""Running a plan: every task that the store lacks a row of, one after another, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longitude.core.store import Row, Store, address
from longitude.eval.records import COST, KIND, LOSS, Measurement, read
from longitude.extension.measure import Bench
from longitude.extension.plan import Plan, Task


@dataclass(frozen=True)
class News:
    """How far a run is: the task that begins, and the shares and seconds left of the whole plan and
    of the step, which is one method's tasks of one measure."""

    task: Task
    done: int
    of: int
    share: float
    left: float | None  # once some work was timed
    step_share: float
    step_left: float | None


Watch = Callable[[News], None]
Engine = Callable[[Plan, Sequence[Task], Store, Watch], None]  # runs the tasks that are missing


def missing(plan: Plan, store: Store) -> list[Task]:
    """The tasks of a plan that the store lacks a row of."""
    return [
        task
        for task in plan.tasks()
        if any(store.get(asked.to_json()) is None for asked in plan.asked(task))
    ]


def measured(plan: Plan, store: Store) -> list[Measurement]:
    """The rows of a plan that the store has, and those that stand in for one it was refused."""
    wanted = [asked.to_json() for task in plan.tasks() for asked in plan.asked(task)]
    found = [read(Row(key, value, "")) for key in wanted if (value := store.get(key)) is not None]
    refused = any(one.refused and one.key.measure == LOSS for one in found)
    return [*found, *(_shorter(plan, store, wanted) if refused else ())]


def _shorter(plan: Plan, store: Store, wanted: Sequence[dict[str, Any]]) -> Iterator[Measurement]:
    """Losses at shorter lengths, taken where the greatest was out of reach."""
    schemes, known = {m.scheme for m in plan.methods}, {address(key) for key in wanted}
    for row in store.rows(kind=KIND, measure=LOSS):
        one = read(row)
        mine = one.key.subject == plan.subject and one.key.text in plan.texts
        if mine and one.key.scheme in schemes and address(row.key) not in known:
            yield one


class Work:
    """How much of a plan is done. Work is counted in tokens, long ones more, because attention
    makes them slower; time goes by the pace so far."""

    def __init__(self, plan: Plan, tasks: Sequence[Task]) -> None:
        self.tasks, self.each = tasks, [work(plan, task) for task in tasks]
        self.start = time.monotonic()

    def news(self, index: int) -> News:
        """The news when task `index` begins."""
        task, done, total = self.tasks[index], sum(self.each[:index]), sum(self.each)
        pace = (time.monotonic() - self.start) / done if done else None
        step = [i for i, t in enumerate(self.tasks) if _step(t) == _step(task)]
        gone, whole = (sum(self.each[i] for i in step if i < n) for n in (index, len(self.each)))

        def left(rest: float) -> float | None:
            return None if pace is None else pace * rest

        shares = (done / total, left(total - done), gone / whole, left(whole - gone))
        return News(task, index, len(self.tasks), *shares)


def _step(task: Task) -> tuple[str, str]:
    return task.method.label, task.measure


def work(plan: Plan, task: Task) -> float:
    """The work of a task: tokens, and what attention adds to them as they get longer."""
    if task.document is not None:
        lengths = [a.length for a in plan.asked(task)]
        return sum(map(_weight, sorted(lengths)[: -1 if len(lengths) > 1 else None]))
    return _weight(task.length) * (plan.asks(task) if task.measure != COST else 2)


def _weight(n: int) -> float:
    return n * (1 + n / 16384)


def local(bench: Bench) -> Engine:
    """The engine of this process."""

    def run(plan: Plan, tasks: Sequence[Task], store: Store, watch: Watch) -> None:
        progress = Work(plan, tasks)
        for index, task in enumerate(tasks):
            watch(progress.news(index))
            do(bench, task, store)

    return run


def do(bench: Bench, task: Task, store: Store) -> None:
    """One task: measured, or known beforehand."""
    lost = beyond(bench.plan, task, store)
    if lost is None:
        bench.run(task, lambda asked, value: store.put(asked.to_json(), value))
        return
    right = {"right": [False] * bench.plan.count(task.measure), "assumed": lost}
    for asked in bench.plan.asked(task):
        store.put(asked.to_json(), bench.row(task.method, right, 0.0))


def beyond(plan: Plan, task: Task, store: Store) -> str | None:
    """Where a method has told none at the length before, it is not asked at a longer one: the
    sentence that says so."""
    if task.measure not in plan.protocol.tasks:
        return None
    before = [t for t in plan.questions(task.method, task.measure) if t.length < task.length]
    rows = [store.get(asked.to_json()) for t in before[-1:] for asked in plan.asked(t)]
    told = [one for row in rows for one in (row or {}).get("right", [True])]
    return f"none of {len(told)} told at {before[-1].length}." if told and not any(told) else None
