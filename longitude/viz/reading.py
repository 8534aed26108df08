"""Where an answer came from, in the terminal: windows token by token, or the way through a tree.

All that a document or a model says is shown without what a terminal would obey.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longitude.core.validate import short
from longitude.viz.plot import DIM
from longitude.viz.table import NOTHING, printable
from longitude.viz.terminal import GAP

if TYPE_CHECKING:
    from longitude.reading.generate import Step

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")
BARS = " ▁▂▃▄▅▆▇█"
WIDE = 64  # windows that are drawn side by side
LISTED = 12  # windows that are told of
LONG = 12  # characters of the longest bar
KEPT = frozenset("\n\t\u200c\u200d")  # the joiners are letters' own


@dataclass(frozen=True)
class Place:
    """A window: the document it is of, where in it, and a few of its words."""

    document: str
    where: str
    words: str


def harmless(text: str) -> str:
    """A text of several lines, without what a terminal would obey: escapes, other controls, and
    signs that turn the direction of writing."""
    return "".join(filter(None, map(_harmless, text)))


def _harmless(letter: str) -> str:
    if letter.isprintable() or letter in KEPT:
        return letter
    kind = unicodedata.category(letter)
    return " " if kind.startswith("Z") else "" if kind in ("Cc", "Cf") else "\ufffd"


def by_windows(steps: Sequence[Step], places: Sequence[Place], console: Console) -> None:
    """Which window each token came from, then the windows themselves."""
    if all(step.window is None for step in steps):
        told = "; ".join(f"{printable(one.document)}, {one.where}" for one in places)
        console.print(f"read as a whole: {told}", markup=False, soft_wrap=True)
        return
    mass = any(step.mass for step in steps)
    console.print(Text("where it came from", style="bold"))
    console.print(_tokens(steps, mass, len(places)))
    what = "the attention" if mass else "the tokens"
    console.print(Text(f"the windows, by their share of {what}", style="bold"))
    _legend(_shares(steps, len(places)), places, console)


def _tokens(steps: Sequence[Step], mass: bool, count: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    table.add_column("token", no_wrap=True)
    table.add_column("window", justify="right")
    table.add_column("attention" if mass else "entropy", justify="right")
    table.add_column(f"windows 1–{count}" if mass and count <= WIDE else "", no_wrap=True)
    for step in (step for step in steps if step.token is not None):
        table.add_row(*(_by_mass(step) if mass else _by_entropy(step)))
    return table


def _by_entropy(step: Step) -> Iterator[Text]:
    """A token, its window, that one's entropy, and the next surest window's."""
    yield Text(_quoted(step.text), style=_colour(step.window))
    yield _number(step.window)
    yield Text(NOTHING if step.entropy is None else f"{step.entropy:.3f}")
    others = [(e, n) for n, e in enumerate(step.entropies) if n != step.window]
    told = f"beside window {min(others)[1] + 1} with {min(others)[0]:.3f}" if others else ""
    yield Text(told, style=DIM)


def _by_mass(step: Step) -> Iterator[Text]:
    """A token, the window that got most of the attention, its share, and all shares drawn."""
    most = max(range(len(step.mass)), key=step.mass.__getitem__, default=None)
    yield Text(_quoted(step.text), style=_colour(most))
    yield _number(most)
    yield Text(NOTHING if most is None else f"{step.mass[most]:.0%}")
    drawn = "".join(_level(share, max(step.mass)) for share in step.mass)
    yield Text(drawn if len(step.mass) <= WIDE else "", style=_colour(most))


def _shares(steps: Sequence[Step], count: int) -> list[float]:
    """How much of an answer came from each window: by attention, or by the tokens chosen."""
    found = [0.0] * count
    for step in steps:
        for n, share in enumerate(step.mass):
            found[n] += share
        if not step.mass and step.window is not None:
            found[step.window] += 1
    whole = sum(found)
    return [one / whole for one in found] if whole else found


def _legend(shares: Sequence[float], places: Sequence[Place], console: Console) -> None:
    """The windows that an answer came from, the most telling first, with a few words of each."""
    order = sorted(range(len(places)), key=lambda n: (-shares[n], n))
    for n in [n for n in order if round(100 * shares[n])][:LISTED]:
        one, bar = places[n], "█" * max(1, round(LONG * shares[n]))
        head = Text.assemble((f"window {n + 1} ", _colour(n)), (f"{bar} {shares[n]:.0%} ", DIM))
        head.append(f"{printable(one.document)}, {one.where}")
        console.print(head, soft_wrap=True)
        words = Text(f"  {printable(one.words)}", style=DIM)
        console.print(words, overflow="ellipsis", no_wrap=True)


def by_path(visit: Mapping[str, Any], place: str, console: Console) -> None:
    """One step of a walk through a tree: where it was, what was decided there, and why."""
    mark, told, style = {
        "down": ("↓", f"goes on to part {(visit['to'] or 0) + 1}", "cyan"),
        "revert": ("↩", "goes back", "yellow"),
        "answer": ("✓", f"answers: {printable(visit['answer'])}", "green"),
        "invalid": ("✗", "gave no reply that could be read", "red"),
    }[visit["action"]]
    node = ".".join(str(n + 1) for n in visit["place"]) or "root"
    head = Text.assemble((f"{mark} ", style), (node, "bold"), (f" ({printable(place)}) ", DIM))
    console.print(Padding(head.append(told, style), (0, 0, 0, 2), expand=False))
    said = [visit["reasoning"], *(f"(not read) {short(reply, 200)}" for reply in visit["invalid"])]
    for line in filter(None, map(printable, said)):
        console.print(Padding(Text(line, style=DIM), (0, 0, 0, 6), expand=False))


def _level(share: float, most: float) -> str:
    return BARS[round(share / most * (len(BARS) - 1))] if most > 0 else BARS[0]


def _number(window: int | None) -> Text:
    return Text(NOTHING if window is None else str(window + 1), style=_colour(window))


def _colour(window: int | None) -> str:
    return DIM if window is None else COLOURS[window % len(COLOURS)]


def _quoted(text: str) -> str:
    return f"“{harmless(text).replace(chr(10), '↵').replace(chr(9), '⇥')}”"
