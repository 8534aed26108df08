"""Experiment trackers that follow a training run: TensorBoard, trackio or Weights & Biases.

Each is imported when it is chosen and opened at the first step, so that nothing is written or sent
before a run is known to be good. TensorBoard and trackio stay on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.training.loop import Step

LOGGERS = ("tensorboard", "trackio", "wandb")
Log = Callable[[dict[str, float], int], None]


def check(name: str | None) -> None:
    """Raise unless a logger is known and installed."""
    if name is not None and name not in LOGGERS:
        raise UserError(f"--report-to is {', '.join(LOGGERS)}, but got {shown(name)}: use one.")
    if name is not None and find_spec(name) is None:
        raise UserError(
            f"--report-to {name} needs the package {name}: pip install {name}, or leave it out."
        )


@contextmanager
def logger(
    name: str | None, out: Path, settings: Mapping[str, Any]
) -> Iterator[Callable[[Step], None]]:
    """A function that records each step; it does nothing without a name."""
    log: Log | None = None
    with ExitStack() as stack:

        def record(step: Step) -> None:
            nonlocal log
            if name is None:
                return
            log = log or _open(name, out, settings, stack)
            figures = {"loss": step.loss, "learning_rate": step.rate}
            log({**figures, "tokens_per_second": step.tokens_per_second}, step.step)

        yield record


def _open(name: str, out: Path, settings: Mapping[str, Any], stack: ExitStack) -> Log:
    """Open a logger, to be closed by the stack."""
    if name == "tensorboard":
        writer = import_module("torch.utils.tensorboard").SummaryWriter(str(out / "tensorboard"))
        stack.callback(writer.close)

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return add_scalars
    module = import_module(name)
    about = {"project": "longitude", "name": out.name, "config": dict(settings)}
    opened = module.init(**about, **({"dir": str(out)} if name == "wandb" else {}))
    run = opened if name == "wandb" else module  # trackio logs to the run that it opened last
    stack.callback(run.finish)
    return lambda numbers, step: run.log(numbers, step=step)
