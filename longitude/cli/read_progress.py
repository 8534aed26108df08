"""What is seen of an answer while it comes: the text on stdout, all else on stderr.

A moving line where someone looks on and nothing is being written; in a log, a line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from longitude.viz.reading import Place, by_path, by_windows, harmless

if TYPE_CHECKING:
    from longitude.reading.answer import Step
    from longitude.reading.memwalker import Visit
    from longitude.reading.select import Choice
    from longitude.reading.tree import Built

PAUSE = 15.0  # seconds between two lines of a log


class Following:
    """Follows one answer."""

    def __init__(self, *, silent: bool, shows: bool, writes: bool) -> None:
        from rich.console import Console

        self.silent, self.shows, self.writes = silent, shows, writes
        self.console = Console(stderr=True, highlight=False)
        self.status: Any = None
        self.begun, self.last = False, "\n"  # of the answer
        self.said = time.monotonic()

    def __enter__(self) -> Following:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._still()
        if error is not None:
            self.end()  # what was said so far stands on lines of its own

    def say(self, news: str) -> None:
        """A line for the person."""
        if not self.silent:
            self.console.print(news, markup=False, soft_wrap=True)

    def chosen(self, choice: Choice) -> None:
        """Which way is taken, if nobody had asked for it."""
        if choice.why:
            self.say(f"by {choice.by}: {harmless(choice.why)}.")

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """While a text is counted and cut."""
        with self._moving("cutting the text into windows …"):
            yield

    @contextmanager
    def reading(self, windows: int) -> Iterator[None]:
        """While the text is read, until the first token."""
        told = f"reading {windows:,} window{'s' if windows > 1 else ''} …"
        with self._moving(told):
            yield

    @contextmanager
    def walking(self) -> Iterator[None]:
        """While a tree is built and walked through."""
        with self._moving("reading …"):
            yield

    def step(self, step: Step) -> None:
        """One token more."""
        self.write(step.text)

    def write(self, text: str) -> None:
        """A piece of the answer."""
        text = harmless(text)
        text = text if self.begun else text.lstrip()
        if not text or not self.writes:
            return
        self._still()  # the moving line would be in the way
        print(text, end="", flush=True)
        self.begun, self.last = True, text[-1]

    def end(self) -> None:
        """The answer is whole, or broken off."""
        if self.last != "\n":
            print(flush=True)
            self.last = "\n"

    def built(self, built: Built) -> None:
        """How far a tree is."""
        kept = f" ({built.kept:,} kept from before)" if built.kept else ""
        told = f"summaries: {built.done:,} of {built.of:,}{kept}"
        self._tell(told, built.done == built.of)

    def visited(self, visit: Visit, where: str) -> None:
        """One step through a tree, told as it comes."""
        if self.shows:
            by_path(visit.plain(), where, self.console)
        elif self.status is not None:
            self._tell(f"looking at {harmless(where)} …", False)

    def show_windows(self, steps: Sequence[Step], places: Sequence[Place]) -> None:
        """Where each token came from."""
        by_windows(steps, places, self.console)

    def _tell(self, told: str, now: bool) -> None:
        if self.status is not None:
            self.status.update(told)
        elif now or time.monotonic() - self.said >= PAUSE:
            self.say(told)
            self.said = time.monotonic()

    @contextmanager
    def _moving(self, told: str) -> Iterator[None]:
        if not self.silent and self.console.is_terminal:
            self.status = self.console.status(told)
            self.status.start()
        try:
            yield
        finally:
            self._still()

    def _still(self) -> None:
        if self.status is not None:
            self.status.stop()
            self.status = None
