"""The results of `longitude lab`: tables and curves in the terminal, Markdown, charts in files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.core.validate import UserError
from longitude.training.lab.rows import TEXT, Bin, Score, Spread, curves, summary
from longitude.training.lab.rows import Cell as LabCell
from longitude.viz import files
from longitude.viz import plot as p
from longitude.viz import result_charts as charts
from longitude.viz import vega as v
from longitude.viz.terminal import BEST, Cell, rich_table
from longitude.viz.text import NOTHING, escaped, fenced, markdown_table, printable
from longitude.viz.vega import Spec

COLOURS = ("cyan", "yellow", "magenta", "blue", "red")  # green is the trained window's
PATTERNS = (p.SOLID, p.DASHED, p.SPARSE, p.DOTTED)  # 5 × 4: twenty schemes differ
STROKE = 26  # pixels of the stroke before a scheme's name


@dataclass(frozen=True)
class LabTable:
    """One task at one trained window: schemes down, test lengths across; and of text the loss in
    bins of positions."""

    task: str
    trained: int
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: Mapping[tuple[str, int], LabCell]
    bins: tuple[Bin, ...]

    @property
    def by_loss(self) -> bool:
        """Whether it is scored by loss, where lower is better."""
        return self.task == TEXT

    @property
    def measure(self) -> str:
        """What its numbers are."""
        share, loss = "share of exact answers", "loss of the last tokens, nats per byte"
        what = loss if self.by_loss else share
        seeds = {c.spread.n for c in self.cells.values() if c.spread}
        most, some = max(seeds, default=1), "up to " if len(seeds) > 1 else ""
        return what + (f"; mean of {some}{most} seeds ± half their range" if most > 1 else "")

    def mean(self, label: str, length: int) -> float | None:
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

    @cached_property
    def curves(self) -> dict[str, list[tuple[float, Spread]]]:
        """Each scheme's points: its loss by position, where there are bins, else its values by test
        length."""
        every = sorted(self.cells.values(), key=lambda c: c.length)
        paths = {
            s: curve_points(b for b in self.bins if b.label == s)
            if self.bins
            else [(float(c.length), c.spread) for c in every if c.label == s and c.spread]
            for s in self.labels
        }
        return {s: path for s, path in paths.items() if path}

    @property
    def ticks(self) -> Sequence[int]:
        """Numbers for the axis of the curves, the trained window first."""
        highest = max((x for path in self.curves.values() for x, _ in path), default=0)
        return position_ticks(self.trained, highest) if self.bins else self.lengths


def lab_tables(scores: Iterable[Score]) -> list[LabTable]:
    """A table for each trained window and task, in the order in which the scores come; texts are
    made safe to print."""
    safe = []
    for s in scores:
        names = {name: printable(getattr(s, name)) for name in ("scheme", "label", "task")}
        safe.append(replace(s, **names, refused=s.refused and printable(s.refused)))
    groups: dict[tuple[str, int], dict[tuple[str, int], LabCell]] = {}
    for c in summary(safe):
        groups.setdefault((c.task, c.trained), {})[c.label, c.length] = c
    tables = []
    for (task, trained), cells in groups.items():
        labels = tuple(dict.fromkeys(label for label, _ in cells))
        lengths = tuple(sorted({length for _, length in cells}))
        bins = tuple(b for b in curves(safe) if task == TEXT and b.trained == trained)
        tables.append(LabTable(task, trained, labels, lengths, cells, bins))
    return tables


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


def markdown(scores: Iterable[Score]) -> str:
    """The tables as Markdown."""
    texts = []
    for table in lab_tables(scores):
        heads = [f"{n} (trained)" if n == table.trained else f"{n}" for n in table.lengths]
        cells = ((s, [table.cell(s, n).markdown() for n in table.lengths]) for s in table.labels)
        rows = [[fenced(s), *line] for s, line in cells]
        head = escaped(f"{table.task}, trained at {table.trained}: {table.measure}.")
        notes = "".join(f"- {escaped(reason)}\n" for reason in table.reasons())
        drawn = markdown_table([escaped(table.task), *heads], rows)
        texts.append(f"{head}\n\n{drawn}" + (f"\n{notes}" if notes else ""))
    return "\n".join(texts)


def show(scores: Iterable[Score], console: Console) -> None:
    """Print a table for each task, then its curves."""
    tables = lab_tables(scores)
    for table in tables:
        console.print(Text(f"{table.task}, trained at {table.trained}", style="bold"))
        console.print(Text(table.measure, style=p.DIM))
        for part in _fitted(table, console.width):
            console.print(part)
        for reason in table.reasons():
            console.print(Text(f"{NOTHING} {reason}", style=p.DIM))
        console.print()
    labels, small = [*dict.fromkeys(label for table in tables for label in table.labels)], []
    for table in tables:
        plot = _plot(table, labels)
        if plot and table.bins:
            console.print(p.draw(plot, min(console.width, 100)))
            console.print()
        elif plot:
            small.append(plot)
    p.side_by_side(small, console)


def _fitted(table: LabTable, width: int) -> Iterator[Table]:
    """As few tables as are wide enough, the interval under its number where there is no room."""
    names = min(max(map(cell_len, table.labels)), max(20, width // 3))
    heads = {n: f"{n}\ntrained" if n == table.trained else f"{n}" for n in table.lengths}
    cells, each = {}, 0
    for between in ("", "\n"):
        cells = {
            (s, n): table.cell(s, n).text(interval=True, between=between)
            for s in table.labels
            for n in table.lengths
        }
        texts = [*heads.values(), *(cell.plain for cell in cells.values())]
        each = max(len(line) for text in texts for line in text.split("\n")) + p.GAP
        if names + p.GAP + each * len(table.lengths) <= width:
            break
    across = max(1, (width - names - p.GAP) // each)
    for first in range(0, len(table.lengths), across):
        lengths = table.lengths[first : first + across]
        styled = [Text(heads[n], p.MARK if n == table.trained else p.DIM) for n in lengths]
        rows = [[Text(s), *(cells[s, n] for n in lengths)] for s in table.labels]
        yield rich_table(["", *styled], rows, names)


def _plot(table: LabTable, labels: Sequence[str]) -> p.Plot | None:
    """A table's curves; one test length alone makes none."""
    paths = table.curves
    xs = sorted({x for path in paths.values() for x, _ in path})
    if len(xs) < 2:
        return None
    styles = {s: (COLOURS[n % 5], PATTERNS[n % 4]) for n, s in enumerate(labels)}
    what = "nats per byte" if table.by_loss else "exact answers"
    where = "position in the longest text" if table.bins else "test length"
    ticks = table.ticks if table.bins else reversed(table.ticks)
    highest = sorted(paths, key=lambda label: -paths[label][-1][1].mean)  # in the order they end
    inside = xs[0] <= table.trained <= xs[-1]
    return p.Plot(
        "Loss by position" if table.bins else table.task,
        f"{what}, by {where} (log)",
        [p.Line(s, [(x, v.mean) for x, v in paths[s]], *styles[s]) for s in highest],
        x_log=True,
        y_log=table.by_loss,
        mark=(f"trained at {table.trained}", table.trained) if inside else None,
        y_ends=() if table.by_loss else (0.0, 1.0),
        x_ticks=[t for t in (table.trained, *ticks) if xs[0] <= t <= xs[-1]],
        height=16,
    )


def write(scores: Iterable[Score], path: Path, title: str) -> None:
    """Draw the tables and curves into a file: .html, .png or .svg."""
    files.check_kind(path)
    rows = [*scores]
    if not rows:
        raise UserError(f"There are no scores to draw into {path}: run some first.")
    count = len({(s.scheme, s.label) for s in rows})
    files.write_spec(spec(rows, title), title, path, v.method_themes(count, first=1))


def spec(scores: Iterable[Score], title: str) -> Spec:
    """A Vega-Lite document: for each task its curves, and beside them its table, which is the key
    to them too."""
    tables, drawn = lab_tables(scores), []
    labels = [*dict.fromkeys(label for table in tables for label in table.labels)]
    for table in tables:
        rows = [
            {"label": s, "x": x, "mean": mean, "low": least, "high": greatest, "seeds": seeds}
            for s, path in table.curves.items()
            for x, (mean, least, greatest, seeds) in path
        ]
        beside = [_table(table, labels)]
        if len({r["x"] for r in rows}) > 1:
            what = "position in the longest text" if table.bins else "test length"
            x = v.axis("x", f"{what} (tokens)", "log2", **charts.length_ticks(rows, table.ticks))
            y = v.axis("mean", "exact answers", ends={"domain": [0, 1]})
            y = charts.loss_axis(rows, "loss (nats per byte)") if table.by_loss else y
            look = {"first": 1, "size": 9 if table.bins else 40, "shade": 0.16}
            layers = charts.lines(rows, labels, table.trained, x, y, **look)
            beside.insert(0, v.inset(v.document(layers), rows, width=460, height=300))
        notes = [line for r in table.reasons() for line in textwrap.wrap(f"– {r}", 150)]
        head = {"text": f"{table.task}, trained at {table.trained:,}", "fontSize": 14, "offset": 14}
        head |= {"subtitle": [table.measure, *notes]}
        drawn.append({"title": head, "hconcat": beside, "spacing": 36, "center": True})
    return {
        "title": {"text": printable(title), "fontSize": 18, "offset": 20},
        "params": [v.CHOSEN],
        "vconcat": drawn,
        "resolve": {"scale": {"fillOpacity": "independent"}},
        "spacing": 44,
    }


def _table(table: LabTable, labels: Sequence[str]) -> Spec:
    """The table, tinted by value; before a scheme's name, its stroke."""
    rows = [
        {"label": c.label, "length": c.length, "reason": c.refused}
        | {"text": f"{shown.value} {shown.interval}", "best": bool(shown.mark)}
        | {"mean": c.spread and c.spread.mean, "seeds": c.spread.n if c.spread else 0}
        for c in table.cells.values()
        for shown in [table.cell(c.label, c.length)]
    ]
    means = [r["mean"] for r in rows if r["seeds"]]
    scale: Spec = {"domain": [0, 1]}
    if table.by_loss and means and min(means) > 0:
        scale = {"type": "log", "domain": [min(means), max(*means, 2 * min(means))]}
    tint = v.channel("mean:Q", scale={**scale, "rangeMin": 0.05, "rangeMax": 0.5}, legend=None)
    named = f"[datum.value == {table.trained} ? 'trained' : '', {v.COUNT}]"
    look: Spec = {"domain": False, "ticks": False}
    top = {"orient": "top", "labelExpr": named, "labelAngle": 0, "labelPadding": 18, **look}
    side = {"labelPadding": STROKE + 12, "labelLimit": 280, "labelFontSize": 11, **look}
    band: Spec = {"paddingInner": 0.06, "paddingOuter": 0}
    y = v.channel("label:N", title=None, axis=side, scale=band, sort=[*table.labels])
    x = v.channel("length:O", title="test length (tokens)", axis=top, scale=band)
    at: Spec = {"x": x, "y": y}
    tips = v.tooltip("label:N", "length:Q", "mean:Q", "seeds:Q", "reason:N", label="scheme")
    shade: Spec = {"tooltip": tips, "fillOpacity": tint, "opacity": v.STRENGTH}
    ends: Spec = {"x": {"value": -STROKE - 6}, "x2": {"value": -6}}
    ends |= {"color": charts.colour(labels), "strokeDash": charts.dash(labels, 1)}
    stroke = v.mark("rule", strokeDash=[1, 0], strokeWidth=2.2, clip=False)
    filled = v.mark("rect", style="worse" if table.by_loss else "better")
    bold, plain = v.mark("text", fontWeight="bold"), v.mark("text", fontWeight="normal")
    layers = [
        v.layer(v.mark("rect", style="hidden"), where="!datum.seeds", **at, tooltip=tips),
        v.layer(filled, where="datum.seeds", **at, **shade),
        v.layer(stroke, [{"label": s} for s in table.labels], y=y, **ends),
        v.layer(bold, where="datum.best", **at, text="text:N"),
        v.layer(plain, where="!datum.best", **at, text="text:N"),
    ]
    each = 24 if len(table.labels) > 8 else 32
    size = {"width": 78 * len(table.lengths), "height": each * len(table.labels)}
    return v.inset(v.document(layers), rows, **size)


def training_spec(losses: Sequence[float], window: int, title: str) -> Spec:
    """The loss of every training step, and its mean over the last `window` steps."""
    rows = [
        {"step": n, "loss": loss, "mean": fmean(losses[max(0, n - window) : n])}
        for n, loss in enumerate(losses, 1)
    ]
    x, y = v.axis("step", "step"), v.axis("loss", "loss (nats per token)", ends={"zero": False})
    dots = v.mark("circle", style="faint", size=14, opacity=0.7)
    layers = [
        v.layer(dots, x=x, y=y, tooltip=v.tooltip("step:Q", "loss:Q", "mean:Q")),
        v.layer(v.mark("line", style="better"), x=x, y={**y, "field": "mean"}),
    ]
    head = {"text": title, "fontSize": 14, "offset": 12}
    return {**v.document(layers, rows, 240), "width": 560, "title": head}
