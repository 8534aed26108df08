"""What fits into a stretch of time: the machine is measured first, then the plan is cut to fit.

A forward over n tokens takes a·n + b·n² seconds; two short ones tell a and b. What is cut goes in
an order that keeps the comparison whole as long as can be: questions a cell, lengths at which they
are asked, costs, documents, and methods last, never "change nothing". What was left out is told.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from longitude.core.validate import UserError, shown
from longitude.eval import perplexity as reading
from longitude.eval.records import COST
from longitude.extension.measure import Bench
from longitude.extension.plan import Plan, Task

OURS = 1.3  # what a scheme on our attention may cost over the plain model
DECODED = 12  # tokens of an answer, about
SPARE = 0.9  # of the budget that is planned for
FEWEST = 4  # methods that are kept


@dataclass(frozen=True)
class Pace:
    """Seconds of one forward: a·n + b·n²; and of one decoded token."""

    each: float
    pair: float
    token: float

    def forward(self, n: int) -> float:
        return self.each * n + self.pair * n * n

    def task(self, plan: Plan, task: Task) -> float:
        """Seconds of a task."""
        if task.document is not None:
            lengths = sorted(asked.length for asked in plan.asked(task))
            return OURS * sum(map(self.forward, lengths[: -1 if len(lengths) > 1 else None]))
        one = self.forward(task.length)
        if task.measure == COST:
            return OURS * (2 * one + plan.protocol.new * self.token)
        return OURS * plan.asks(task) * (one + DECODED * self.token)

    def plan(self, plan: Plan) -> float:
        return sum(self.task(plan, task) for task in plan.tasks())


def seconds(text: str) -> float:
    """A time: 90s, 10m, 2h, or seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--budget takes a time, but got {shown(text)}: write 90s, 10m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def pace(bench: Bench) -> Pace:
    """How fast this machine runs this model."""
    trained, target = bench.plan.subject.trained, bench.plan.target
    if bench.plan.subject.family == "learned":
        target = trained  # as it is, it has no positions beyond
    ids = bench.documents[0].ids
    near, far = max(64, trained // 4), min(target, trained)
    one, two = (_timed(lambda n=n: reading.losses(bench.model, ids[: n + 1])) for n in (near, far))
    pair = max(0.0, (two / far - one / near) / (far - near)) if far > near else 0.0
    each = max(1e-9, two / far - pair * far)
    token = _timed(lambda: reading.losses(bench.model, ids[:3]))
    return Pace(each, pair, token)


def _timed(run: Callable[[], Any]) -> float:
    """Seconds of the faster of two runs, after one that does not count."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def fit(plan: Plan, pace: Pace, budget: float) -> tuple[Plan, list[str]]:
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
            yield _protocol(questions=count), f"{count} questions a cell instead of more"
    ends = (plan.lengths[0], plan.target)
    yield _field(question_lengths=ends), f"questions at {ends[0]:,} and {ends[1]:,} alone"
    yield _protocol(depths=(0.0, 0.5, 1.0)), "questions at three depths instead of five"
    if plan.protocol.cost:
        yield _protocol(cost=False), "no cost"
    for count in range(len(plan.texts) - 1, 1, -1):
        yield _field(texts=plan.texts[:count]), f"{count} documents instead of {len(plan.texts)}"
    if plan.protocol.tasks:
        yield _protocol(tasks=()), "no questions"
    for count in range(len(plan.methods) - 1, FEWEST - 1, -1):
        gone = ", ".join(m.label for m in plan.methods[count:])
        yield _field(methods=plan.methods[:count]), f"without {gone}"
    if len(plan.texts) > 1:
        yield _field(texts=plan.texts[:1]), "one document: nothing can be told apart"


def _field(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **changes)


def _protocol(**changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, protocol=replace(plan.protocol, **changes))
