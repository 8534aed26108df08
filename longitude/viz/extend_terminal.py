"""What `longitude extend` found, in the terminal: a table that shows at a glance what matters, the
advice, and what to type next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longitude.viz.extend_section import BEST, NEAR, NOT_ASKED, TIED, Section, Shown
from longitude.viz.extend_text import advice, forgotten, notes, scores, searches
from longitude.viz.plot import DIM, GAP
from longitude.viz.text import printable

MOST = 5  # columns of lengths
HEADS = {
    "reach": "effective\nlength",
    "tax": "in-window\ncost",
    "prefill": "prefill\ntok/s",
    "decode": "decode\nms",
    "memory": "memory\npeak",
}
WORDS = {
    "context": "loss: nats per token of the same last tokens, with so much context",
    "loss": "loss: nats per token, of so many first tokens",
    "passkey": "passkeys: retrieved at {target:,}",
    "reach": "effective length: the longest with 80 % of them",
    "tax": "in-window cost: loss inside the window over the baseline's, in nats",
    "prefill": "prefill and decode: at {target:,}",
}
Column = tuple[str, str, list[Text]]  # what it is, its head, and a number for each method


def terminal(section: Section, console: Console) -> None:
    """The table of all methods as far as it fits, what was refused, the advice, what to type."""
    console.print(Text(section.title, style="bold"))
    trained, target = section.subject.trained, section.target
    console.print(Text(f"trained on {trained:,} tokens, read up to {target:,}", style=DIM))
    console.print()
    names = min(max(map(len, section.labels)), max(16, console.width // 3))
    columns = _columns(section, plain=not console.is_terminal)
    fitting = [*_fitting(columns, console.width - names - GAP)]
    console.print(_table(section, names, fitting))
    for line in _small(section, {name for name, _, _ in fitting}):
        console.print(Text(line, style=DIM))
    console.print()
    for what, sentence in _sentences(section):
        console.print(Text(what, style="bold"))
        console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    judged = scores(section)
    if judged:
        console.print(Text("lm-eval", style="bold"))
        console.print(Padding(_plain_table(*judged), (0, 0, 0, 2), expand=False))
    for title, command in section.what_next:
        console.print()
        console.print(Text(title, style=DIM))
        for line in command.splitlines():
            kept = line[: len(line) - len(line.lstrip())].expandtabs()
            console.print(Text(f"  {kept}{printable(line)}", style="cyan"), soft_wrap=True)


def _sentences(section: Section) -> Iterator[tuple[str, str]]:
    yield from advice(section)
    for sentence, scheme in searches(section):
        yield "search", f"{sentence} {scheme}".strip()


def _small(section: Section, columns: Collection[str]) -> Iterator[str]:
    """What the signs and heads of the table mean, and what is missing from it."""
    told = [WORDS[name].format(target=section.target) for name in WORDS if name in columns]
    yield "; ".join(told)
    yield f"bold or *: the best; {NEAR}: not significantly different (95 %, paired by document)"
    if section.any_assumed:
        yield NOT_ASKED
    for why in [*section.refusals(), *forgotten(section), *notes(section)]:
        yield f"– {why}"


def _columns(section: Section, plain: bool) -> Iterator[Column]:
    """The measure that ranks at several lengths, then the others at the target."""
    board, ranked = section.main, section.ranked
    if board:
        head = board.metric.heading
        for n in _few(board.lengths, section.subject.trained):
            cells = [_worded(section.cell(board, s, n), plain) for s in ranked]
            yield board.measure, f"{head}\n{n:,}", cells
    for c in section.columns():
        if c.name not in ("over", board and board.measure):
            cells = [_worded(section.shown(s, c.name), plain) for s in ranked]
            yield c.name, HEADS.get(c.name, c.title), cells


def _few(lengths: Sequence[int], trained: int) -> list[int]:
    """The window and what is beyond it, the target last; a few of them where there are many."""
    inside = max((n for n in lengths if n <= trained), default=0)
    past = [n for n in lengths if n >= inside]
    last, many = len(past) - 1, min(len(past), MOST)
    return [past[round(i * last / max(1, many - 1))] for i in range(many)]


def _table(section: Section, names: int, columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    table.add_column("method", style="cyan", overflow="fold", max_width=names)
    for _, head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for n, label in enumerate(section.ranked):
        chosen = "bold cyan" if label == section.best else ""
        table.add_row(Text(label, style=chosen), *(cells[n] for _, _, cells in columns))
    return table


def _fitting(columns: Iterable[Column], room: int) -> Iterator[Column]:
    """As many as find room, the most telling first."""
    for name, head, cells in columns:
        room -= max(map(len, [*head.split("\n"), *(t.plain for t in cells)])) + GAP
        if room < 0:
            return
        yield name, head, cells


def _worded(one: Shown, plain: bool) -> Text:
    star = "*" if one.mark == BEST and plain else NEAR if one.mark == TIED else ""
    value = (one.value, "bold" if one.mark == BEST else "")
    return Text.assemble((star, DIM), value, (one.sign, DIM))


def _plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=DIM)
    for n, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if n else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
