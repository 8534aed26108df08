"""What the results of commands have in common: a table for the terminal, and a file for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class TextResult:
    """A result that `show` prints on a console of rich."""

    def show(self, console: Console) -> None:
        """Print the result."""
        raise NotImplementedError

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """What the terminal prints."""
        from longitude.viz.terminal import render

        return render(self.show, color=color, width=width)

    def report(self, path: str | Path) -> Path:
        """Write what the terminal prints as a page (.html) or as Markdown (.md)."""
        from longitude.viz.terminal import write_rendered

        return write_rendered(self.show, Path(path))
