"""The progress of a training run: loss, tokens a second, time left. On stderr.

A bar where someone looks on; in a log, a line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from longitude.cli.output import say

PAUSE = 15.0  # seconds between two lines of a log


@runtime_checkable
class Training(Protocol):
    """How far a run is."""

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def rate(self) -> float: ...  # tokens a second
    @property
    def left(self) -> float: ...  # seconds


class Bar:
    """Follows one run after another; `tell` moves it on."""

    def __init__(self, progress: Any, drawn: bool, speaks: bool) -> None:
        self.progress, self.drawn, self.speaks = progress, drawn, speaks
        self.name, self.task, self.said = "", None, time.monotonic()

    def start(self, name: str) -> None:
        """Begin with the next run."""
        self.name = name
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(name, total=None, loss="", pace="")

    def tell(self, training: Training) -> None:
        """Show how far a run is."""
        loss, pace = f"loss {training.loss:.3f}", f"{training.rate:,.0f} tokens/s"
        if self.drawn:
            steps = {"total": training.steps, "completed": training.step}
            self.progress.update(self.task, **steps, loss=loss, pace=pace)
        elif self.speaks and time.monotonic() - self.said >= PAUSE:
            left = timedelta(seconds=round(training.left))
            say(f"{self.name}: {training.step}/{training.steps}, {loss}, {pace}, {left} left")
            self.said = time.monotonic()


@contextmanager
def bar(speaks: bool) -> Iterator[Bar]:
    """Progress, told by the one process that speaks."""
    from rich import progress as p
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (
        p.TextColumn("{task.description}", markup=False),
        p.BarColumn(),
        p.MofNCompleteColumn(),
        p.TextColumn("{task.fields[loss]}"),
        p.TextColumn("{task.fields[pace]}"),
        p.TimeRemainingColumn(),
    )
    drawn = speaks and console.is_terminal
    with p.Progress(*columns, console=console, disable=not drawn, transient=True) as progress:
        yield Bar(progress, drawn, speaks)
