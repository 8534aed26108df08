"""`longitude lint` in the terminal: a row per runtime, then each issue with its fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from longitude.runtimes.lint import LintResult, Row


def show_lint(found: LintResult, console: Console) -> None:
    """Print faults, the table and the issues."""
    for fault in found.faults:
        console.print(Text(f"{fault.name}: ", style="bold").append(fault.sentence, style="default"))
    if found.meant.starts:
        table = Table(box=None, pad_edge=False)
        table.add_column("runtime")
        for head in ("frequencies off by", "cos, sin ×", "longest input"):
            table.add_column(head, justify="right")
        meant = found.meant
        table.add_row("meant", "", f"{meant.attention:.4f}", f"{meant.length:,}", style="bold")
        for row in found.rows:
            style = "" if row.same else "yellow"
            table.add_row(f"{row.runtime} {row.version}", *_cells(row), style=style)
        console.print(table)
    for title, sentence in _issues(found):
        console.print(Text(title, style="bold"))
        console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    if found.same:
        console.print(Text("every runtime computes what the settings mean", style="green"))


def _cells(row: Row) -> tuple[str, str, str]:
    if not row.difference.starts:
        return "does not start", "", ""
    size = row.difference.frequencies
    off = "other pairs" if size > 1e9 else f"{size:.2%}" if size > 1e-6 else "–"
    return off, f"{row.found.attention:.4f}", f"{row.found.length:,}"


def _issues(found: LintResult) -> Iterator[tuple[str, str]]:
    """Each issue once, with the runtimes that have it; then notes."""
    causes = [(issue, row.runtime) for row in found.rows for issue in row.issues]
    notes = [(issue, row.runtime) for row in found.rows for issue in row.notes]
    for suffix, met in (("", causes), (" (a note)", notes)):
        for issue in dict.fromkeys(issue for issue, _ in met):
            names = ", ".join(dict.fromkeys(name for other, name in met if other == issue))
            yield f"{issue.name}: {names}{suffix}", f"{issue.sentence} → {issue.fix}"
    for issue in found.notes:
        yield f"{issue.name} (a note)", f"{issue.sentence} → {issue.fix}"
