"""The progress of a plan: time left for all of it and for the step at hand. On stderr.

Two bars where someone looks on; in a log, a line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from longitude.cli.output import say

if TYPE_CHECKING:
    from longitude.extend.run import News

PAUSE = 15.0  # seconds between two lines of a log


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
            elif not quiet and (news.done == 0 or time.monotonic() - said >= PAUSE):
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
