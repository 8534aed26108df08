"""Where a training run is followed besides the terminal: TensorBoard, trackio or Weights & Biases.

Each is imported when it is asked for and opened at the first step, so that nothing is written or
sent before a run is known to be good. TensorBoard and trackio stay on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longitude.core.validate import UserError, shown

if TYPE_CHECKING:
    from longitude.training.tune.options import Step

BOARDS = ("tensorboard", "trackio", "wandb")
PROJECT = "longitude"
Log = Callable[[Mapping[str, float], int], None]
Close = Callable[[], None]


def check(name: str | None) -> None:
    """Raise unless a board is known and installed."""
    if name is None:
        return
    if name not in BOARDS:
        raise UserError(f"--report-to is {', '.join(BOARDS)}, but got {shown(name)}: use one.")
    if find_spec(name) is None:
        raise UserError(
            f"--report-to {name} needs the package {name}: pip install {name}, or leave it out."
        )


@contextmanager
def board(
    name: str | None, out: Path, settings: Mapping[str, Any]
) -> Iterator[Callable[[Step], None]]:
    """A function that records each step; it does nothing without a name."""
    opened: list[tuple[Log, Close]] = []

    def tell(step: Step) -> None:
        if name is None:
            return
        if not opened:
            opened.append(_OPEN[name](out, settings))
        numbers = {"loss": step.loss, "learning_rate": step.rate}
        numbers["tokens_per_second"] = step.tokens_per_second
        opened[0][0](numbers, step.step)

    try:
        yield tell
    finally:
        for _, close in opened:
            close()


def _tensorboard(out: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(out / "tensorboard"))

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _trackio(out: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    trackio = import_module("trackio")
    trackio.init(project=PROJECT, name=out.name, config=dict(settings))
    return lambda numbers, step: trackio.log(dict(numbers), step=step), trackio.finish


def _wandb(out: Path, settings: Mapping[str, Any]) -> tuple[Log, Close]:
    wandb = import_module("wandb")
    run = wandb.init(project=PROJECT, name=out.name, config=dict(settings), dir=str(out))
    return lambda numbers, step: run.log(dict(numbers), step=step), run.finish


_OPEN: dict[str, Callable[[Path, Mapping[str, Any]], tuple[Log, Close]]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
