"""The one progress display: a bar on a terminal, elsewhere a line every 15 seconds. On stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from longitude.cli.output import say
from longitude.core.progress import Event, Progress

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
