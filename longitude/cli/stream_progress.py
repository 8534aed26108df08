"""How fast a stream is and what it holds, on stderr: a line that moves where someone looks on and
nothing is being written, and one line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from longitude.cli.output import say

if TYPE_CHECKING:
    from longitude.hf.streaming import Stream


class Pace:
    """Follows one stream."""

    def __init__(self, stream: Stream) -> None:
        from rich.console import Console

        self.stream, self.begun = stream, time.monotonic()
        self.console = Console(stderr=True, highlight=False)
        self.drawn = self.console.is_terminal
        self.asks = self.drawn and sys.stdin.isatty()
        self.status: Any = None

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.status is not None:
            self.status.stop()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A moving line while the stream reads; none while it writes, where it would be in the
        way."""
        if not self.drawn:
            yield
            return
        from rich.live import Live

        # stdout stays what it is: it may be a file
        options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
        self.status = Live(self._line(), console=self.console, transient=True, **options)
        with self.status:
            yield
        self.status = None

    def tell(self) -> None:
        """Move the line on."""
        if self.status is not None:
            self.status.update(self._line())

    def above(self, line: str) -> None:
        """A line of output while the moving one stands below it."""
        if self.status is not None and sys.stdout.isatty():
            self.status.console.print(line, markup=False)
        else:
            print(line, flush=True)

    def ask(self) -> bool:
        """Show that something may be said."""
        if self.asks:
            print("> ", end="", file=sys.stderr, flush=True)
        return True

    def turn(self) -> None:
        """After an answer, where someone looks on."""
        if self.drawn:
            self.console.print(self._line(), style="dim", markup=False)

    def end(self, how: str = "") -> None:
        """The one line that is always said."""
        seconds = time.monotonic() - self.begun
        say(f"{how + ': ' if how else ''}{self._line()}, {seconds:,.1f} s in all.")

    def _line(self) -> str:
        s = self.stream
        return f"{s.tokens:,} tokens, {s.rate:,.1f} tokens/s, {s.memory / 2**20:,.1f} MiB kept"
