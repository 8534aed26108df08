"""The progress of a training run: loss, tokens a second, time left. On stderr.

A bar where someone looks on; in a log, a line now and then.

The progress of a plan: time left for all of it and for the step at hand. On stderr.

Two bars where someone looks on; in a log, a line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from longitude.cli.output import say
from longitude.core.progress import Event, Progress

if TYPE_CHECKING:
    from longitude.core.progress import Event as News


LOG_INTERVAL = 15.0  # seconds between two lines of a log


@contextmanager
def display(quiet: bool = False) -> Iterator[Progress]:
    """Show events on stderr: a bar on a terminal, elsewhere a line every 15 s."""
    from rich import progress as p
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    drawn = console.is_terminal and not quiet
    columns = (
        p.TextColumn("{task.description}", markup=False),
        p.BarColumn(),
        p.TaskProgressColumn(),
        p.TextColumn("{task.fields[figures]}", markup=False),
        p.TextColumn("{task.fields[left]}", markup=False),
    )
    started, printed, job = time.monotonic(), float("-inf"), None
    with p.Progress(*columns, console=console, disable=not drawn, transient=True) as bars:
        bar = bars.add_task("", total=1.0, figures="", left="")

        def show(event: Event) -> None:
            nonlocal started, printed, job
            if not event.total:  # a message
                return None if quiet else say(event.stage)
            now = time.monotonic()
            if event.job != job:
                job, started, printed = event.job, now, float("-inf")
            name = ": ".join(filter(None, (event.job, event.stage)))
            figures = ", ".join(f"{key} {value}" for key, value in event.figures.items())
            left = _time_left(event, now - started)
            if drawn:
                bars.update(
                    bar,
                    total=event.total,
                    completed=event.done,
                    description=name,
                    figures=figures,
                    left=left,
                )
            elif not quiet and now - printed >= LOG_INTERVAL:
                done = f"{name} {event.done:,.0f}/{event.total:,.0f}"
                say(", ".join(filter(None, (done, figures, left))))
                printed = now

        try:
            yield show
        except KeyboardInterrupt as stop:
            if stop.args:  # a run that was asked to stop says how to continue it
                say(str(stop))
            raise


def _time_left(event: Event, elapsed: float) -> str:
    seconds = event.seconds_left
    if seconds is None and event.done > 0:
        seconds = elapsed * (event.total - event.done) / event.done
    return "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"


# below: the displays that `display` replaces, until every command has moved to it
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


PAUSE_STEPS = 15.0  # seconds between two lines of a log


@contextmanager
def steps(quiet: bool) -> Iterator[Callable[[News], None]]:
    """A function that is told the news."""
    from rich import progress as p
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (
        p.TextColumn("{task.description}", markup=False),
        p.BarColumn(),
        p.TaskProgressColumn(),
        p.TextColumn("{task.fields[left]}", markup=False),
    )
    drawn = console.is_terminal and not quiet
    said = time.monotonic()
    with p.Progress(*columns, console=console, disable=not drawn, transient=True) as bars:
        whole = bars.add_task("all", total=1.0, left="")
        step = bars.add_task("", total=1.0, left="")

        def tell(news: News) -> None:
            nonlocal said
            task = news.task
            name = f"{task.method.label}: {_doing(news)}"
            if drawn:
                bars.update(whole, completed=news.share, left=_left(news.left))
                bars.update(
                    step, completed=news.step_share, description=name, left=_left(news.step_left)
                )
            elif not quiet and (news.done == 0 or time.monotonic() - said >= PAUSE_STEPS):
                left = _left(news.left)
                say(f"{news.done}/{news.of} {name}" + (f", {left} for all" if left else ""))
                said = time.monotonic()

        yield tell


def _doing(news: News) -> str:
    task = news.task
    if task.document is not None:
        return f"document {task.document + 1}"
    return f"{task.measure} at {task.length:,}"


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{timedelta(seconds=round(seconds))} left"
