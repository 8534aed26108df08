"""What commands display: the progress of a long job, and a result as a table or a page.

A function takes `progress: Progress = silent` and calls it with an `Event` now and then; the
command line passes its display (`cli/common.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Event:
    """`done` of `total` units of a job are finished; `stage` says what runs now. An event without a
    total is a message to the user."""

    stage: str  # "yarn(4): passkey at 2,048"
    done: float
    total: float
    job: str = ""  # "measure", "train rope()": a new name starts a new bar
    figures: Mapping[str, str] = field(default_factory=dict)  # shown beside it: {"loss": "1.234"}
    seconds_left: float | None = None  # estimated by the display if None


Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """Report nothing."""


class TextResult:
    """A result that `show` prints on a rich console."""

    def show(self, console: Console) -> None:
        raise NotImplementedError

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """Return what the terminal prints."""
        from longitude.viz.terminal import render

        return render(self.show, color=color, width=width)

    def report(self, path: str | Path) -> Path:
        """Write what the terminal prints as a page (.html), Markdown (.md) or text (.txt)."""
        from longitude.viz.terminal import write_rendered

        return write_rendered(self.show, Path(path))
