"""What `longitude extend` found, as words: the terminal's table and a model card's summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longitude.eval.compare import Board
from longitude.report.board import printable
from longitude.report.extending.section import BEST, TIED, Column, Section, Shown, shown
from longitude.report.markdown import escaped, fenced, markdown_table
from longitude.report.plot import DIM
from longitude.report.terminal import GAP

NEAR = "≈"
KEY = f"bold or *: the best; {NEAR}: can't be told from it (95 %, paired by document)"


def terminal(section: Section, console: Console) -> None:
    """The recommendation, the table of all methods as far as it fits, and what was refused."""
    console.print(Text(section.title, style="bold"))
    trained, target = section.subject.trained, section.target
    console.print(Text(f"trained on {trained:,} tokens, read up to {target:,}", style=DIM))
    console.print()
    console.print(_table(section, console.width, plain=not console.is_terminal))
    console.print(Text(KEY, style=DIM))
    for why in section.refusals():
        console.print(Text(f"– {why}", style=DIM))
    console.print()
    for what, sentence in advice(section):
        console.print(Text(what, style="bold"))
        console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    for title, command in section.what_next:
        console.print()
        console.print(Text(title, style=DIM))
        for line in command.splitlines():
            kept = line[: len(line) - len(line.lstrip())].expandtabs()
            console.print(Text(f"  {kept}{printable(line)}", style="cyan"), soft_wrap=True)


def advice(section: Section) -> Iterator[tuple[str, str]]:
    """Each recommendation: what for, and the sentence."""
    told = section.recommendation
    for one in [told.get("best"), *told.get("runtimes", ()), told.get("factor")]:
        if one:
            yield printable(one["what"]), printable(one["sentence"])


def markdown(section: Section, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """A section of a model card; `pictures` are titles and files."""
    subject = section.subject
    head = f"## {escaped(section.title)} at {section.target:,} tokens\n"
    said = "".join(f"- **{escaped(what)}**: {escaped(told)}\n" for what, told in advice(section))
    facts = f"Trained on {subject.trained:,} tokens; its own scheme is {fenced(subject.scheme)}.\n"
    boards = [_by_length(b) for name, b in section.boards.items() if name in ("context", "passkey")]
    refused = "".join(f"- {escaped(why)}\n" for why in section.refusals())
    drawn = "".join(f"![{escaped(title)}]({file})\n" for title, file in pictures)
    ran = "".join(f"- {escaped(line)}\n" for line in section.machines())
    machine = f"Measured on:\n\n{ran}" if ran else ""
    parts = [head, facts, said, _methods(section), refused, *boards, drawn, machine]
    return "\n".join(filter(None, parts))


def _methods(section: Section) -> str:
    columns = section.columns()
    heads = ["method", *(f"{c.title} ({c.unit})" for c in columns), "scheme"]
    rows = [
        [fenced(s), *(_cell(section.shown(s, c.name)) for c in columns), fenced(section.schemes[s])]
        for s in section.ranked
    ]
    note = f"**Bold**: the best; {NEAR}: can’t be told from it; ± and ranges are 95 % intervals."
    return markdown_table(heads, rows) + f"\n{note}\n"


def _by_length(board: Board) -> str:
    heads = [f"{n:,}{' (trained)' if n == board.trained else ''}" for n in board.lengths]
    rows = [[fenced(s), *(_cell(shown(board, s, n)) for n in board.lengths)] for s in board.labels]
    return f"{board.title}, {board.unit}:\n\n" + markdown_table(["method", *heads], rows)


def _cell(one: Shown) -> str:
    value = f"**{one.value}**" if one.mark == BEST else one.value
    near = f"{NEAR} " if one.mark == TIED else ""
    return f"{near}{value}{f' ({one.swing})' if one.swing else ''}"


def _table(section: Section, width: int, plain: bool) -> Table:
    """As many columns as find room, the most telling first."""
    columns = section.columns()
    names = min(max(map(len, section.labels)), max(16, width // 3))
    cells = {
        c.name: [_worded(section.shown(s, c.name), plain) for s in section.ranked] for c in columns
    }
    fitting = [*_fitting(columns, cells, width - names - GAP)]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    table.add_column("method", style="cyan", overflow="fold", max_width=names)
    for c in fitting:
        table.add_column(_head(c), justify="right", no_wrap=True)
    for n, label in enumerate(section.ranked):
        chosen = "bold cyan" if label == section.best else ""
        table.add_row(Text(label, style=chosen), *(cells[c.name][n] for c in fitting))
    return table


def _fitting(
    columns: Sequence[Column], cells: dict[str, list[Text]], room: int
) -> Iterator[Column]:
    for c in columns:
        lines = [*_head(c).split("\n"), *(t.plain for t in cells[c.name])]
        room -= max(map(len, lines)) + GAP
        if room < 0:
            return
        yield c


def _head(column: Column) -> str:
    """Three short lines: what, in which unit, at which length."""
    unit = column.unit.replace("tokens with 80 % of passkeys", "80 % found")
    return f"{column.title}\n{re.sub(', ', chr(10), unit, count=1)}"


def _worded(one: Shown, plain: bool) -> Text:
    star = "*" if one.mark == BEST and plain else NEAR if one.mark == TIED else ""
    return Text.assemble((star, DIM), (one.value, "bold" if one.mark == BEST else ""))
