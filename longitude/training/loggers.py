"""Experiment trackers that follow a training run: TensorBoard, trackio or Weights & Biases.

Each is imported when it is chosen and opened at the first step, so that nothing is written or sent
before a run is known to be good. TensorBoard and trackio stay on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.training.loop import Step

LOGGERS = ("tensorboard", "trackio", "wandb")
PROJECT = "longitude"
Log = Callable[[Mapping[str, float], int], None]
Close = Callable[[], None]


def check(name: str | None) -> None:
    """Raise unless a logger is known and installed."""
    if name is None:
        return
    if name not in LOGGERS:
        raise UserError(f"--report-to is {', '.join(LOGGERS)}, but got {shown(name)}: use one.")
    if find_spec(name) is None:
        raise UserError(
            f"--report-to {name} needs the package {name}: pip install {name}, or leave it out."
        )


@contextmanager
def logger(
    name: str | None, out: Path, settings: Mapping[str, Any]
) -> Iterator[Callable[[Step], None]]:
    """A function that records each step; it does nothing without a name."""
    opened: list[tuple[Log, Close]] = []

    def record(step: Step) -> None:
        if name is None:
            return
        if not opened:
            opened.append(_open(name, out, settings))
        log, _ = opened[0]
        figures = {"loss": step.loss, "learning_rate": step.rate}
        log({**figures, "tokens_per_second": step.tokens_per_second}, step.step)

    try:
        yield record
    finally:
        for _, close in opened:
            close()


def _open(name: str, out: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    if name == "tensorboard":
        writer = import_module("torch.utils.tensorboard").SummaryWriter(str(out / "tensorboard"))

        def log(numbers: Mapping[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return log, writer.close
    run = module = import_module(name)
    about: dict[str, Any] = {"project": PROJECT, "name": out.name, "config": dict(settings)}
    if name == "wandb":
        run = module.init(**about, dir=str(out))
    else:  # trackio logs to the run that it opened last
        module.init(**about)
    return lambda numbers, step: run.log(dict(numbers), step=step), run.finish
