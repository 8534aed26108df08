"""What fits into a time budget: the machine is timed first, then the plan is cut to fit.

A forward over n tokens takes a·n + b·n² seconds; two short ones give a and b. What is cut goes in
an order that keeps the comparison intact as long as possible: questions per cell, lengths at
which they are asked, costs, documents, and methods last, never the baseline. What was left out is
reported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from longitude.core.validate import UserError, shown
from longitude.eval.perplexity import losses
from longitude.eval.tasks import measured_by
from longitude.extension.plan import Plan, Prepared, Task

OVERHEAD = 1.3  # of a scheme on our attention over the plain model
ANSWER_TOKENS = 12  # about
COST_FORWARDS = 6  # of a method and of the baseline, in alternating rounds
SPARE = 0.9  # of the budget that is planned for
MIN_METHODS = 4


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


def seconds(text: str) -> float:
    """A time: 90s, 10m, 2h, or seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--budget takes a time, but got {shown(text)}: write 90s, 10m or 2h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def pace(prepared: Prepared) -> Pace:
    """How fast this machine runs this model."""
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
