"""What a lab run found: tables and curves in the terminal, Markdown, and a page of charts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.core.validate import UserError
from longitude.training.lab.rows import Bin, Score, curves
from longitude.viz import files
from longitude.viz.lab_charts import lab_spec
from longitude.viz.plot import (
    DASHED,
    DIM,
    DOTTED,
    MARK,
    SOLID,
    SPARSE,
    Line,
    Pattern,
    Plot,
    Point,
    draw,
)
from longitude.viz.table import Board, boards, points, round_positions, tidy
from longitude.viz.terminal import GAP, side_by_side
from longitude.viz.text import escaped, fenced, markdown_table

COLOURS = ("cyan", "yellow", "magenta", "blue", "red")  # green is the trained window's
PATTERNS: tuple[Pattern, ...] = (SOLID, DASHED, SPARSE, DOTTED)  # 5 × 4: twenty schemes differ
Look = tuple[str, Pattern]
WIDE, TALL = 100, 16


def show(scores: Iterable[Score], console: Console) -> None:
    """Print a table for each task, then curves: loss by position, and the rest by length."""
    found = tidy(scores)
    every = boards(found)
    for board in every:
        console.print(Text(f"{board.task}, trained at {board.trained}", style="bold"))
        console.print(Text(board.measure, style=DIM))
        for table in tables(board, console.width):
            console.print(table)
        for reason in board.reasons():
            console.print(Text(f"– {reason}", style=DIM))
        console.print()
    bins = curves(found)
    looks = _looks(label for board in every for label in board.labels)
    for plot in loss_plots(bins, looks):
        console.print(draw(plot, min(console.width, WIDE)))
        console.print()
    drawn = {b.trained for b in bins}
    left = [b for b in every if not (b.by_loss and b.trained in drawn)]
    for row in side_by_side([p for b in left for p in by_length(b, looks)], console.width):
        console.print(row)
        console.print()


def write(scores: Iterable[Score], path: Path, title: str) -> None:
    """Draw the tables and curves into a file: .html, .png or .svg."""
    files.check_kind(path)
    found = [*scores]
    if not found:
        raise UserError(f"There are no scores to draw into {path}: run some first.")
    files.write_spec(lab_spec(found, title), title, path)


def markdown(scores: Iterable[Score]) -> str:
    """The tables as Markdown."""
    return "\n".join(_markdown_board(board) for board in boards(tidy(scores)))


def tables(board: Board, width: int) -> Iterator[Table]:
    """The board in as few tables as are wide enough, the swing under its number where need be."""
    names = min(max(map(cell_len, board.labels)), max(20, width // 3))
    for between in ("", "\n"):
        cells = [_cell(board, s, n, between) for s in board.labels for n in board.lengths]
        heads = [_head(board, n) for n in board.lengths]
        each = max(len(line) for t in [*cells, *heads] for line in t.plain.split("\n")) + GAP
        if names + GAP + each * len(board.lengths) <= width:
            break
    across = max(1, (width - names - GAP) // each)
    for first in range(0, len(board.lengths), across):
        yield _table(board, board.lengths[first : first + across], names, between)


def loss_plots(bins: Sequence[Bin], looks: Mapping[str, Look]) -> Iterator[Plot]:
    """Loss by position, for each trained window."""
    for trained in dict.fromkeys(b.trained for b in bins):
        here = [b for b in bins if b.trained == trained]
        curves: dict[str, list[Point]] = {
            label: [(x, s.mean) for x, s in points(b for b in here if b.label == label)]
            for label in dict.fromkeys(b.label for b in here)
        }
        axes = "nats a byte (log), by position in the longest text (log)"
        ticks = round_positions(trained, max(b.past for b in here))
        yield _plot("Loss by position", axes, curves, looks, trained, ticks)


def by_length(board: Board, looks: Mapping[str, Look]) -> Iterator[Plot]:
    """Values by test length; one length alone makes no curve."""
    curves: dict[str, list[Point]] = {}
    for label in board.labels:
        ys = [(n, m) for n in board.lengths if (m := board.mean(label, n)) is not None]
        curves |= {label: [*ys]} if ys else {}
    if len({n for curve in curves.values() for n, _ in curve}) > 1:
        what = "nats a byte (log)" if board.by_loss else "exact answers"
        axes, ends = f"{what}, by test length (log)", () if board.by_loss else (0.0, 1.0)
        ticks = [board.trained, *reversed(board.lengths)]
        yield _plot(board.task, axes, curves, looks, board.trained, ticks, ends)


def _plot(
    title: str,
    axes: str,
    curves: dict[str, list[Point]],
    looks: Mapping[str, Look],
    trained: int,
    ticks: Sequence[int],
    ends: Sequence[float] = (),
) -> Plot:
    highest = sorted(curves, key=lambda label: -(curves[label][-1][1] or 0))  # as they end
    xs = [x for curve in curves.values() for x, _ in curve]
    low, high = min(xs), max(xs)
    return Plot(
        title,
        axes,
        [Line(label, curves[label], *looks[label]) for label in highest],
        x_ratios=True,
        y_ratios=not ends,
        mark=(f"trained at {trained}", trained) if low <= trained <= high else None,
        y_ends=ends,
        x_ticks=[t for t in ticks if low <= t <= high],
        height=TALL,
    )


def _looks(labels: Iterable[str]) -> dict[str, Look]:
    """One colour and pattern for each scheme, the same in every picture."""
    once = enumerate(dict.fromkeys(labels))
    return {s: (COLOURS[n % len(COLOURS)], PATTERNS[n % len(PATTERNS)]) for n, s in once}


def _table(board: Board, lengths: Sequence[int], names: int, between: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="")
    table.add_column("", style="cyan", overflow="fold", max_width=names)
    for length in lengths:
        table.add_column(_head(board, length), justify="right", no_wrap=True)
    for name in board.labels:
        table.add_row(Text(name), *(_cell(board, name, n, between) for n in lengths))
    return table


def _head(board: Board, length: int) -> Text:
    here = length == board.trained
    return Text(f"{length}\ntrained" if here else f"{length}", MARK if here else DIM)


def _cell(board: Board, label: str, length: int, between: str) -> Text:
    value, swing = board.value(label, length), board.swing(label, length)
    look = "bold" if board.best(label, length) else DIM if value == "–" else ""
    return Text.assemble((value, look), (between + swing if swing else "", DIM))


def _markdown_board(board: Board) -> str:
    heads = [f"{n} (trained)" if n == board.trained else f"{n}" for n in board.lengths]
    rows = [
        [fenced(label), *(_markdown_cell(board, label, n) for n in board.lengths)]
        for label in board.labels
    ]
    made = markdown_table([escaped(board.task), *heads], rows)
    notes = "".join(f"- {escaped(reason)}\n" for reason in board.reasons())
    head = escaped(f"{board.task}, trained at {board.trained}: {board.measure}.")
    return f"{head}\n\n{made}" + (f"\n{notes}" if notes else "")


def _markdown_cell(board: Board, label: str, length: int) -> str:
    value, swing = board.value(label, length), board.swing(label, length)
    best = f"**{value}**" if board.best(label, length) else value
    return f"{best} {swing}".strip()
