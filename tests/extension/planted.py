"""Methods whose numbers are planted, and a clock that only they move: rounds without a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from longitude.eval.records import CONTEXT, COST, KEPT, LOSS, RETRIEVAL, ResultKey, Text
from longitude.eval.tasks import EvalProtocol
from longitude.extension import measure
from longitude.extension.measure import Pace, Record
from longitude.extension.plan import Method, Plan, Task
from tests.measured import SUBJECT

TEXTS = tuple(Text(f"t{n}", f"d{n}") for n in range(4))
PROTOCOL = EvalProtocol(SUBJECT.trained, ("kept_context", "passkey"), stretches=4)
PACE = Pace(linear=1e-3, quadratic=1e-7)


def plan_of(*names: str, protocol: EvalProtocol = PROTOCOL) -> Plan:
    """A plan of the baseline and these methods, at one, two and four windows."""
    methods = [Method("baseline", SUBJECT.scheme, None), *(Method(n, n, n) for n in names)]
    return Plan(SUBJECT, tuple(methods), (256, 512, 1024), TEXTS, protocol)


class Planted:
    """An evaluator that measures what a method is said to be: the share it keeps, which decides its
    answers, too, and what its loss is over 2 nats."""

    def __init__(self, plan: Plan, kept: Mapping[str, float], over: Mapping[str, float]) -> None:
        self.plan, self.kept, self.over = plan, kept, over
        self.workers = [self]
        self.ran: list[Task] = []
        self.now, self.slower = 0.0, 1.0  # seconds; times what the pace says

    def run(self, task: Task, record: Record) -> None:
        self.ran.append(task)
        self.now += self.slower * PACE.task(self.plan, task)
        for key in self.plan.keys(task):
            record(key, {"label": task.method.label, "refused": None, **self.value(task, key)})

    def value(self, task: Task, key: ResultKey) -> dict[str, Any]:
        label = task.method.label
        past = label == "baseline" and key.length > SUBJECT.trained
        share = 0.0 if past else self.kept.get(label, 0.2)
        loss = 2.0 + (7.0 if past else self.over.get(label, 0.0))
        shift = random.Random(f"{key.text} {key.at}").gauss(0, 0.01)  # the same for every method
        if key.measure == LOSS:
            means = [[n, loss + shift] for n in key.protocol["lengths"]]
            return {"means": means, "past": [m for m in means if m[0] > 256], "bins": []}
        if key.measure == CONTEXT:
            return {"loss": loss + shift}
        rng = random.Random(f"{label} {key.length} {key.at}")
        if key.measure == KEPT:
            gains = [[10 * (share + rng.gauss(0, 0.02)), 10.0] for _ in range(4)]
            return {"gains": gains, "share": share, "stderr": 0.01, "keys": 40}
        if key.measure == RETRIEVAL:
            losses = [2 - 2 * share + rng.gauss(0, 0.05) for _ in range(4)]
            return {"losses": losses, "exacts": [x < 1.5 for x in losses], "loss": 1, "exact": 0.5}
        assert key.measure == COST
        return {"prefill": 1e3, "decode": 1.0, "peak": 1000, "speed": [1, 1, 1], "rounds": 3}

    def keeps_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tasks alone move the clock."""
        monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: self.now))

    def rounds_of(self, label: str, kind: str = KEPT) -> set[int]:
        """The rounds in which a method was measured."""
        return {t.round for t in self.ran if t.method.label == label and t.measure == kind}
