"""The progress bar of a training run: loss, tokens a second, time left. On stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longitude.lab.train import Progress as Training


class Bar:
    """A bar for one run after another; `tell` moves it on."""

    def __init__(self, progress: Any) -> None:
        self.progress, self.task = progress, None

    def start(self, name: str) -> None:
        """Begin with the next run."""
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(name, total=None, loss="", pace="")

    def tell(self, training: Training) -> None:
        """Show how far a run is."""
        self.progress.update(
            self.task,
            total=training.steps,
            completed=training.step,
            loss=f"loss {training.loss:.3f}",
            pace=f"{training.rate:,.0f} tokens/s",
        )


@contextmanager
def bar(shown: bool) -> Iterator[Bar]:
    """A bar where someone looks on; elsewhere nothing is drawn."""
    from rich.console import Console
    from rich.progress import (  # fmt: skip
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, disable=not shown, transient=True) as progress:
        yield Bar(progress)
