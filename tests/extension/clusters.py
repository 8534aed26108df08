"""A small plan for a cluster, and a cluster that is played."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from longitude.extension.plan import ExtendOptions, Prepared, TargetModel, prepare
from longitude.extension.ray import Group, Worker, WorkerSpec

SMALL = ExtendOptions(
    methods="rope(frequencies=yarn(2, original=256))", lengths=(256, 512), docs=2,
    text=(argparse.__file__,), tasks=("kept_context", "passkey"), questions=1, cost=False,
    device="cpu",
)  # fmt: skip


def small(target: TargetModel) -> Prepared:
    """A plan that was changed: workers must not lay out one of their own."""
    full = prepare(target, 512, SMALL)
    protocol = replace(full.plan.protocol, stretches=1)
    return replace(full, plan=replace(full.plan, protocol=protocol))


class Lost(Exception):
    """What the stand-in raises for Ray's errors."""


class Played:
    """Ray, played in this process: `answer` says what a worker makes of an group."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, answer: Callable[[Group], Any], **resources: float) -> None:
        self.answer, self.resources = answer, resources or {"CPU": 2.0}
        self.made = self.killed = 0
        self.requests: Counter[Group] = Counter()

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def put(self, value: Any) -> Any:
        return value

    def remote(self, kind: type) -> Any:
        assert kind is Worker

        def make(spec: WorkerSpec) -> Any:
            self.made += 1
            begin = SimpleNamespace(remote=lambda: self.ask(()))
            return SimpleNamespace(begin=begin, measure=SimpleNamespace(remote=self.ask))

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=make))

    def ask(self, group: Group) -> Any:
        self.requests[group] += 1
        return _Awaited(group)

    def wait(self, answers: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        return answers[-1:], answers[:-1]

    def get(self, answer: _Awaited) -> Any:
        found = self.answer(answer.group)
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, worker: Any) -> None:
        self.killed += 1


class _Awaited:
    def __init__(self, group: Group) -> None:
        self.group = group


def play(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Group], Any], **resources: float
) -> Played:
    ray = Played(answer, **resources)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    return ray


def answered(group: Group) -> list[Any]:
    """An answer of the right form: a row for each task."""
    return [({"task": repr(task)}, {"label": task.method.label}) for task in group]
