"""Where an answer of `longitude read` came from: windows token by token, or a walk through a tree.

Texts of documents and models are printed without characters that a terminal would interpret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from longitude.core.validate import short
from longitude.reading.documents import Piece, excerpt
from longitude.viz.plot import DIM
from longitude.viz.terminal import rich_table
from longitude.viz.text import NOTHING, printable, safe_lines

if TYPE_CHECKING:
    from longitude.reading.generate import Step

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
BARS = " ▁▂▃▄▅▆▇█"
MAX_DRAWN = 64  # windows whose shares are drawn side by side
MAX_LISTED = 12  # windows that are listed
BAR = 12  # characters of the longest bar


def by_windows(
    steps: Sequence[Step], windows: Sequence[Piece], wanted: str, console: Console
) -> None:
    """Print which window each token came from, then the windows themselves, the largest share
    first, each with the sentence that contains most of the words in `wanted`."""
    if all(step.window is None for step in steps):
        places = "; ".join(f"{printable(piece.document.name)}, {piece.place}" for piece in windows)
        console.print(f"read in full: {places}", markup=False, soft_wrap=True)
        return
    by_mass = any(step.mass for step in steps)
    drawn = f"windows 1–{len(windows)}" if by_mass and len(windows) <= MAX_DRAWN else ""
    heads = ["token", "window", "attention" if by_mass else "entropy", drawn]
    rows = [_row(step, by_mass) for step in steps if step.token is not None]
    table = rich_table(heads, rows)
    table.columns[0].style, table.columns[3].justify = "", "left"
    console.print(Text("where it came from", style="bold"))
    console.print(table)
    basis = "the attention" if by_mass else "the tokens"
    console.print(Text(f"the windows, by their share of {basis}", style="bold"))
    totals = [0.0] * len(windows)
    for step in steps:
        for n, share in enumerate(step.mass):
            totals[n] += share
        if not step.mass and step.window is not None:
            totals[step.window] += 1
    shares = {n: piece / (sum(totals) or 1) for n, piece in enumerate(totals)}
    order = sorted((n for n in shares if round(100 * shares[n])), key=lambda n: (-shares[n], n))
    for n in order[:MAX_LISTED]:
        piece, bar = windows[n], "█" * max(1, round(BAR * shares[n]))
        head = Text.assemble((f"window {n + 1} ", _colour(n)), (f"{bar} {shares[n]:.0%} ", DIM))
        head.append(f"{printable(piece.document.name)}, {piece.place}")
        console.print(head, soft_wrap=True)
        words = Text(f"  {printable(excerpt(piece.text, wanted))}", style=DIM)
        console.print(words, overflow="ellipsis", no_wrap=True)


def _row(step: Step, by_mass: bool) -> tuple[Text, ...]:
    """A token and its window: with attention, the largest share and a drawing of all shares;
    otherwise the entropy and the window with the next lowest."""
    if by_mass:
        window = max(range(len(step.mass)), key=step.mass.__getitem__, default=None)
        value = NOTHING if window is None else f"{step.mass[window]:.0%}"
        largest = max(step.mass, default=0) or 1
        levels = (BARS[round(share / largest * (len(BARS) - 1))] for share in step.mass)
        more = Text("".join(levels) if len(step.mass) <= MAX_DRAWN else "", style=_colour(window))
    else:
        window, value = step.window, NOTHING if step.entropy is None else f"{step.entropy:.3f}"
        others = [(e, n) for n, e in enumerate(step.entropies) if n != window]
        next_lowest = f"next: window {min(others)[1] + 1}, {min(others)[0]:.3f}" if others else ""
        more = Text(next_lowest, style=DIM)
    text = safe_lines(step.text).replace("\n", "↵").replace("\t", "⇥")
    number = NOTHING if window is None else str(window + 1)
    style = _colour(window)
    return Text(f"“{text}”", style=style), Text(number, style=style), Text(value), more


def by_path(visit: Mapping[str, Any], place: str, console: Console) -> None:
    """Print one step of a walk through a tree: where it was, what was decided there, and why."""
    mark, decision, style = {
        "down": ("↓", f"descends to part {(visit['to'] or 0) + 1}", "cyan"),
        "revert": ("↩", "goes back", "yellow"),
        "answer": ("✓", f"answers: {printable(visit['answer'])}", "green"),
        "invalid": ("✗", "gave no valid reply", "red"),
    }[visit["action"]]
    node = ".".join(str(n + 1) for n in visit["place"]) or "root"
    head = Text.assemble((f"{mark} ", style), (node, "bold"), (f" ({printable(place)}) ", DIM))
    console.print(Padding.indent(head.append(decision, style), 2))
    invalid = (f"(invalid) {short(reply, 200)}" for reply in visit["invalid"])
    for line in filter(None, map(printable, [visit["reasoning"], *invalid])):
        console.print(Padding.indent(Text(line, style=DIM), 6))


def _colour(window: int | None) -> str:
    return DIM if window is None else COLOURS[window % len(COLOURS)]
