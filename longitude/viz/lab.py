"""The results of `longitude lab`: tables and curves in the terminal, Markdown, charts in files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.core.validate import UserError
from longitude.training.lab.rows import TEXT, Bin, Score, Spread, curves, summary
from longitude.training.lab.rows import Cell as LabCell
from longitude.viz import files
from longitude.viz import plot as p
from longitude.viz.result_charts import lab_spec, training_spec
from longitude.viz.table import BEST, Cell, rich_table
from longitude.viz.text import NOTHING, escaped, fenced, markdown_table, printable
from longitude.viz.theme import method_config
from longitude.viz.vega import Spec

COLOURS = ("cyan", "yellow", "magenta", "blue", "red")  # green is the trained window's
PATTERNS = (p.SOLID, p.DASHED, p.SPARSE, p.DOTTED)  # 5 × 4: twenty schemes differ
Style = tuple[str, p.Pattern]


@dataclass(frozen=True)
class LabTable:
    """One task at one trained window: schemes down, test lengths across."""

    task: str
    trained: int
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: Mapping[tuple[str, int], LabCell]

    @property
    def by_loss(self) -> bool:
        """Whether it is scored by loss, where lower is better."""
        return self.task == TEXT

    @property
    def measure(self) -> str:
        """What its numbers are."""
        what = (
            "loss of the last tokens, nats per byte" if self.by_loss else "share of exact answers"
        )
        seeds = {c.spread.n for c in self.cells.values() if c.spread}
        if max(seeds, default=1) == 1:
            return what
        many = f"{'up to ' if len(seeds) > 1 else ''}{max(seeds)} seeds"
        return f"{what}; mean of {many} ± half their range"

    def mean(self, label: str, length: int) -> float | None:
        """The mean over seeds, where there is one."""
        cell = self.cells.get((label, length))
        return cell.spread.mean if cell and cell.spread else None

    def cell(self, label: str, length: int) -> Cell:
        """A number as printed: a dash where a scheme has none, empty where it was not run. The best
        has no better one at its length as printed, and some worse."""
        cell = self.cells.get((label, length))
        if not cell or not cell.spread:
            return Cell(NOTHING if cell else "", reason=cell.refused if cell else None)
        digits = 3 if self.by_loss else 2
        means = [m for s in self.labels if (m := self.mean(s, length)) is not None]
        value, best = f"{cell.spread.mean:.{digits}f}", (min if self.by_loss else max)(means)
        several = len({f"{m:.{digits}f}" for m in means}) > 1
        mark = BEST if several and value == f"{best:.{digits}f}" else ""
        half = (cell.spread.greatest - cell.spread.least) / 2
        return Cell(value, f"±{half:.{digits}f}" if cell.spread.n > 1 else "", mark)

    def reasons(self) -> list[str]:
        """Why there are dashes: each reason once, with the schemes and lengths it is for."""
        groups: dict[tuple[str, str], list[str]] = {}
        for label in self.labels:
            tried = [n for n in self.lengths if (label, n) in self.cells]
            missing = [n for n in tried if self.mean(label, n) is None]
            last = len(missing) > 1 and missing == tried[-len(missing) :]
            where = f"from {missing[0]} on" if last else f"at {', '.join(map(str, missing))}"
            given = [r for n in missing if (r := self.cells[label, n].refused)]
            if given:
                groups.setdefault((given[0], where), []).append(label)
        return [f"{', '.join(who)} {where}: {why}" for (why, where), who in groups.items()]

    def curves(self, bins: Sequence[Bin]) -> dict[str, list[tuple[float, Spread]]]:
        """Each scheme's points: its loss by position, where there are bins for it, else its values
        by test length."""
        if mine := self.bins(bins):
            points = {s: curve_points(b for b in mine if b.label == s) for s in self.labels}
        else:
            every = sorted(self.cells.values(), key=lambda c: c.length)
            points = {
                s: [(float(c.length), c.spread) for c in every if c.label == s and c.spread]
                for s in self.labels
            }
        return {s: path for s, path in points.items() if path}

    def bins(self, bins: Sequence[Bin]) -> list[Bin]:
        """The bins of positions that are this table's."""
        return [b for b in bins if self.by_loss and b.trained == self.trained]


def lab_tables(scores: Iterable[Score]) -> list[LabTable]:
    """A table for each trained window and task, in the order in which the scores come."""
    cells: dict[tuple[int, str], dict[tuple[str, int], LabCell]] = {}
    for c in summary(scores):
        cells.setdefault((c.trained, c.task), {})[c.label, c.length] = c
    return [
        LabTable(
            task=task,
            trained=trained,
            labels=tuple(dict.fromkeys(label for label, _ in group)),
            lengths=tuple(sorted({length for _, length in group})),
            cells=group,
        )
        for (trained, task), group in cells.items()
    ]


def curve_points(bins: Iterable[Bin]) -> list[tuple[float, Spread]]:
    """One curve's points: each bin at the middle of its positions (counted from 1, on a log axis),
    and the last once more where it ends."""
    inside = sorted(bins, key=lambda b: b.first)
    path = [(math.sqrt((b.first + 1) * b.past), b.spread) for b in inside]
    return [*path, *((float(b.past), b.spread) for b in inside[-1:] if b.past > b.first + 1)]


def position_ticks(trained: int, high: float) -> list[int]:
    """Numbers for an axis of positions: the trained window, and by fours up and down from it."""
    steps = [round(trained * 4.0**n) for n in (0, *range(1, 8), *range(-1, -12, -1))]
    return [n for n in dict.fromkeys(steps) if 1 <= n <= high]


def show(scores: Iterable[Score], console: Console) -> None:
    """Print a table for each task, then its curves."""
    safe = _printable(scores)
    tables, bins = lab_tables(safe), curves(safe)
    for table in tables:
        console.print(Text(f"{table.task}, trained at {table.trained}", style="bold"))
        console.print(Text(table.measure, style=p.DIM))
        for part in _fitted(table, console.width):
            console.print(part)
        for reason in table.reasons():
            console.print(Text(f"{NOTHING} {reason}", style=p.DIM))
        console.print()
    labels = enumerate(dict.fromkeys(label for table in tables for label in table.labels))
    styles = {s: (COLOURS[n % len(COLOURS)], PATTERNS[n % len(PATTERNS)]) for n, s in labels}
    plots = [(_plot(t, bins, styles), bool(t.bins(bins))) for t in tables]
    for plot in (plot for plot, wide in plots if plot and wide):
        console.print(p.draw(plot, min(console.width, 100)))
        console.print()
    p.side_by_side([plot for plot, wide in plots if plot and not wide], console)


def write(scores: Iterable[Score], path: Path, title: str) -> None:
    """Draw the tables and curves into a file: .html, .png or .svg."""
    files.check_kind(path)
    rows = [*scores]
    if not rows:
        raise UserError(f"There are no scores to draw into {path}: run some first.")
    count = len({(s.scheme, s.label) for s in rows})
    themes = [method_config(count, first=1, dark=dark) for dark in (False, True)]
    files.write_spec(spec(rows, title), title, path, themes)


def spec(scores: Iterable[Score], title: str) -> Spec:
    """The tables and curves as a Vega-Lite document."""
    safe = _printable(scores)
    return lab_spec(lab_tables(safe), curves(safe), printable(title))


def write_training_loss(losses: Sequence[float], window: int, title: str, path: Path) -> None:
    """Draw the loss of every step and its mean over the last `window` into a file."""
    files.write_spec(training_spec(losses, window, title), title, path)


def markdown(scores: Iterable[Score]) -> str:
    """The tables as Markdown."""
    return "\n".join(_markdown(table) for table in lab_tables(_printable(scores)))


def _markdown(table: LabTable) -> str:
    heads = [f"{n} (trained)" if n == table.trained else f"{n}" for n in table.lengths]
    rows = [
        [fenced(s), *(table.cell(s, n).markdown() for n in table.lengths)] for s in table.labels
    ]
    head = escaped(f"{table.task}, trained at {table.trained}: {table.measure}.")
    notes = "".join(f"- {escaped(reason)}\n" for reason in table.reasons())
    drawn = markdown_table([escaped(table.task), *heads], rows)
    return f"{head}\n\n{drawn}" + (f"\n{notes}" if notes else "")


def _fitted(table: LabTable, width: int) -> Iterator[Table]:
    """As few tables as are wide enough, the interval under its number where there is no room."""
    names = min(max(map(cell_len, table.labels)), max(20, width // 3))
    heads = {n: f"{n}\ntrained" if n == table.trained else f"{n}" for n in table.lengths}
    each, between = 0, ""
    for between in ("", "\n"):
        cells = [table.cell(s, n) for s in table.labels for n in table.lengths]
        texts = [*heads.values(), *(c.text(interval=True, between=between).plain for c in cells)]
        each = max(len(line) for text in texts for line in text.split("\n")) + p.GAP
        if names + p.GAP + each * len(table.lengths) <= width:
            break
    across = max(1, (width - names - p.GAP) // each)
    for first in range(0, len(table.lengths), across):
        lengths = table.lengths[first : first + across]
        styled = [Text(heads[n], p.MARK if n == table.trained else p.DIM) for n in lengths]
        rows = [
            [Text(s), *(table.cell(s, n).text(interval=True, between=between) for n in lengths)]
            for s in table.labels
        ]
        yield rich_table(["", *styled], rows, names)


def _plot(table: LabTable, bins: Sequence[Bin], styles: Mapping[str, Style]) -> p.Plot | None:
    """A table's curves; one test length alone makes none."""
    paths = table.curves(bins)
    xs = sorted({x for path in paths.values() for x, _ in path})
    if len(xs) < 2:
        return None
    by_position = bool(table.bins(bins))
    what = "nats per byte" if table.by_loss else "exact answers"
    where = "position in the longest text" if by_position else "test length"
    ticks = position_ticks(table.trained, xs[-1]) if by_position else reversed(table.lengths)
    highest = sorted(paths, key=lambda label: -paths[label][-1][1].mean)  # in the order they end
    inside = xs[0] <= table.trained <= xs[-1]
    return p.Plot(
        "Loss by position" if by_position else table.task,
        f"{what}, by {where} (log)",
        [p.Line(s, [(x, v.mean) for x, v in paths[s]], *styles[s]) for s in highest],
        x_log=True,
        y_log=table.by_loss,
        mark=(f"trained at {table.trained}", table.trained) if inside else None,
        y_ends=() if table.by_loss else (0.0, 1.0),
        x_ticks=[t for t in (table.trained, *ticks) if xs[0] <= t <= xs[-1]],
        height=16,
    )


def _printable(scores: Iterable[Score]) -> list[Score]:
    """The scores with their texts safe to print."""
    names = ("scheme", "label", "task")
    return [
        replace(
            s,
            **{name: printable(getattr(s, name)) for name in names},
            refused=s.refused and printable(s.refused),
        )
        for s in scores
    ]
