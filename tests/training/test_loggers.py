"""Loggers get every step, are opened at the first and closed at the end."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from longitude.core.validate import UserError
from longitude.training import loop
from longitude.training.loop import Step

STEPS = [Step(n, 2, 3.0 - n, 1e-4 * n, 100.0, 1.0 * n, 2.0 - n) for n in (1, 2)]
LOGGED = [
    ({"loss": 2.0, "learning_rate": 1e-4, "tokens_per_second": 100.0}, 1),
    ({"loss": 1.0, "learning_rate": 2e-4, "tokens_per_second": 100.0}, 2),
]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """A package of this name, for as long as a test runs."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, name, made)


def follow(name: str | None, out: Path) -> None:
    loop.check_logger(name)
    with loop.logger(name, out, {"model": "tiny-rope"}) as record:
        for step in STEPS:
            record(step)


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_runs_are_opened_told_and_closed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def log(numbers: dict[str, float], step: int) -> None:
        calls.append((numbers, step))

    def init(**options: Any) -> Any:
        assert options["project"] == "longitude" and options["config"] == {"model": "tiny-rope"}
        calls.append(options["name"])
        return SimpleNamespace(log=log, finish=finish)

    def finish() -> None:
        calls.append("closed")

    module(monkeypatch, name, init=init, log=log, finish=finish)
    follow(name, tmp_path / "run")
    assert calls == ["run", *LOGGED, "closed"]


def test_tensorboard_gets_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(folder)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append("closed")

    module(monkeypatch, "tensorboard")
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=Writer)
    follow("tensorboard", tmp_path)
    scalars = [(name, value, step) for numbers, step in LOGGED for name, value in numbers.items()]
    assert calls == [str(tmp_path / "tensorboard"), *scalars, "closed"]


def test_none_by_default(tmp_path: Path) -> None:
    follow(None, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", loop.LOGGERS)
def test_one_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"needs the package {name}: pip install {name}"):
        loop.check_logger(name)


def test_one_that_is_not_known() -> None:
    with pytest.raises(UserError, match="--report-to is tensorboard, trackio, wandb, but got"):
        loop.check_logger("paper")
