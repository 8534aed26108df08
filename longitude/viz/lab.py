"""The results of `longitude lab`: tables and curves in the terminal, Markdown, charts in files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from longitude.core.validate import UserError
from longitude.eval.records import TEXT, Score
from longitude.eval.stats import Interval
from longitude.eval.tables import Place
from longitude.viz import files
from longitude.viz import plot as p
from longitude.viz import result_charts as charts
from longitude.viz import vega as v
from longitude.viz.terminal import BEST, Cell, rich_table
from longitude.viz.text import NOTHING, escaped, fenced, markdown_table, printable
from longitude.viz.vega import Spec

COLOURS = ("cyan", "yellow", "magenta", "blue", "red")  # green marks the trained window
PATTERNS = (p.SOLID, p.DASHED, p.SPARSE, p.DOTTED)  # 5 × 4: twenty schemes look different
Point = tuple[float, Interval]
STROKE = 26  # pixels of the stroke before a scheme's name


@dataclass(frozen=True)
class LabTable:
    """One task at one trained window: schemes down, test lengths across. A value is the mean over
    seeds with their range. A curve is a scheme's loss by position if that was measured, otherwise
    its values by test length."""

    task: str
    trained: int
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: Mapping[Place, Interval | None]  # for every scheme and length that was run
    refused: Mapping[Place, str]
    curves: Mapping[str, Sequence[Point]]
    by_position: bool

    @property
    def by_loss(self) -> bool:
        """Whether the task is scored by loss, so that lower is better."""
        return self.task == TEXT

    @property
    def measure(self) -> str:
        """A description of the table's numbers."""
        share, loss = "share of exact answers", "loss of the last tokens, nats per byte"
        what = loss if self.by_loss else share
        seeds = {value.n for value in self.cells.values() if value}
        count, up_to = max(seeds, default=1), "up to " if len(seeds) > 1 else ""
        return what + (f"; mean of {up_to}{count} seeds ± half their range" if count > 1 else "")

    def cell(self, label: str, length: int) -> Cell:
        """A number as printed: a dash where a scheme has none, empty where it was not run. The best
        numbers of a length, as printed, are marked unless all are equal."""
        place = label, length
        value = self.cells.get(place)
        if value is None:
            return Cell(NOTHING if place in self.cells else "", reason=self.refused.get(place))
        digits = 3 if self.by_loss else 2
        means = [other.mean for (_, n), other in self.cells.items() if n == length and other]
        text, best = f"{value.mean:.{digits}f}", (min if self.by_loss else max)(means)
        several = len({f"{m:.{digits}f}" for m in means}) > 1
        mark = BEST if several and text == f"{best:.{digits}f}" else ""
        half = (value.high - value.low) / 2
        return Cell(text, f"±{half:.{digits}f}" if value.n > 1 else "", mark)

    def reasons(self) -> list[str]:
        """The reasons for dashes, each once with the schemes and lengths that it applies to."""
        groups: dict[tuple[str, str], list[str]] = {}
        for label in self.labels:
            tried = [n for n in self.lengths if (label, n) in self.cells]
            missing = [n for n in tried if self.cells[label, n] is None]
            last = len(missing) > 1 and missing == tried[-len(missing) :]
            where = f"from {missing[0]} on" if last else f"at {', '.join(map(str, missing))}"
            why_missing = [r for n in missing if (r := self.refused.get((label, n)))]
            if why_missing:
                groups.setdefault((why_missing[0], where), []).append(label)
        return [f"{', '.join(labels)} {where}: {why}" for (why, where), labels in groups.items()]

    @property
    def ticks(self) -> Sequence[int]:
        """The ticks of the curves' x axis, the trained window first."""
        highest = max((x for path in self.curves.values() for x, _ in path), default=0)
        return position_ticks(self.trained, highest) if self.by_position else self.lengths


def lab_tables(scores: Iterable[Score]) -> list[LabTable]:
    """A table for each trained window and task, in the order of the scores; of equal runs the last
    counts. Schemes that share a label are shown by their written forms, since they would
    otherwise pass for two seeds. Texts are made safe to print."""
    last: dict[tuple[Any, ...], Score] = {}
    schemes: dict[str, set[str]] = {}
    for s in scores:
        names = {name: printable(getattr(s, name)) for name in ("scheme", "label", "task")}
        s = replace(s, **names, refused=s.refused and printable(s.refused))
        last[s.scheme, s.label, s.seed, s.task, s.trained, s.length] = s
        schemes.setdefault(s.label, set()).add(s.scheme)
    groups: dict[tuple[str, int], dict[Place, list[Score]]] = {}
    for s in last.values():
        label = s.label if len(schemes[s.label]) == 1 else s.scheme
        groups.setdefault((s.task, s.trained), {}).setdefault((label, s.length), []).append(s)
    return [_lab_table(*group, seeds) for group, seeds in groups.items()]


def _lab_table(task: str, trained: int, seeds: Mapping[Place, Sequence[Score]]) -> LabTable:
    """Build a table from the scores of all seeds at each (label, length)."""
    cells, refused = {}, {}
    for place, scores in seeds.items():
        values = [s.value for s in scores if s.value is not None]
        cells[place] = _over_seeds(values) if values else None
        if not values and (why := next((s.refused for s in scores if s.refused), None)):
            refused[place] = why
    labels = tuple(dict.fromkeys(label for label, _ in seeds))
    lengths = tuple(sorted({length for _, length in seeds}))
    scored = labels if task == TEXT else ()
    curves = {s: path for s in scored if (path := _loss_by_position(s, seeds))}
    by_length = {
        s: [(float(n), value) for n in lengths if (value := cells.get((s, n)))] for s in labels
    }
    paths = curves or {s: path for s, path in by_length.items() if path}
    return LabTable(task, trained, labels, lengths, cells, refused, paths, bool(curves))


def _loss_by_position(label: str, seeds: Mapping[Place, Sequence[Score]]) -> list[Point]:
    """The loss curve of a scheme's longest text that has one. Each bin is at the geometric mean of
    its positions (counted from 1); the last one is repeated at its end."""
    curves = [s for (name, _), scores in seeds.items() if name == label for s in scores if s.curve]
    longest = max((s.length for s in curves), default=0)
    bins: dict[tuple[int, int], list[float]] = {}
    for first, past, loss in (bin for s in curves if s.length == longest for bin in s.curve):
        bins.setdefault((first, past), []).append(loss)
    places = sorted(bins)
    path = [(math.sqrt((a + 1) * b), _over_seeds(bins[a, b])) for a, b in places]
    return [*path, *((float(b), path[-1][1]) for a, b in places[-1:] if b > a + 1)]


def _over_seeds(values: Sequence[float]) -> Interval:
    """The mean over seeds, with their range as its bounds."""
    return Interval(math.fsum(values) / len(values), min(values), max(values), len(values))


def position_ticks(trained: int, high: float) -> list[int]:
    """Ticks of a position axis: the trained window, then multiples and fractions of it by fours."""
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
        if plot and table.by_position:
            console.print(p.draw(plot, min(console.width, 100)))
            console.print()
        elif plot:
            small.append(plot)
    p.side_by_side(small, console)


def _fitted(table: LabTable, width: int) -> Iterator[Table]:
    """As few tables as fit the width; intervals go under their numbers if space is short."""
    names = min(max(map(cell_len, table.labels)), max(20, width // 3))
    heads = {n: f"{n}\ntrained" if n == table.trained else f"{n}" for n in table.lengths}
    cells, cell_width = {}, 0
    for between in ("", "\n"):
        cells = {
            (s, n): table.cell(s, n).text(interval=True, between=between)
            for s in table.labels
            for n in table.lengths
        }
        texts = [*heads.values(), *(cell.plain for cell in cells.values())]
        cell_width = max(len(line) for text in texts for line in text.split("\n")) + p.GAP
        if names + p.GAP + cell_width * len(table.lengths) <= width:
            break
    across = max(1, (width - names - p.GAP) // cell_width)
    for first in range(0, len(table.lengths), across):
        lengths = table.lengths[first : first + across]
        styled = [Text(heads[n], p.MARK if n == table.trained else p.DIM) for n in lengths]
        rows = [[Text(s), *(cells[s, n] for n in lengths)] for s in table.labels]
        yield rich_table(["", *styled], rows, names)


def _plot(table: LabTable, labels: Sequence[str]) -> p.Plot | None:
    """Plot a table's curves; None if there is one test length only."""
    paths = table.curves
    xs = sorted({x for path in paths.values() for x, _ in path})
    if len(xs) < 2:
        return None
    styles = {s: (COLOURS[n % 5], PATTERNS[n % 4]) for n, s in enumerate(labels)}
    what = "nats per byte" if table.by_loss else "exact answers"
    where = "position in the longest text" if table.by_position else "test length"
    ticks = table.ticks if table.by_position else reversed(table.ticks)
    ordered = sorted(paths, key=lambda label: -paths[label][-1][1].mean)  # ordered by their ends
    inside = xs[0] <= table.trained <= xs[-1]
    return p.Plot(
        "Loss by position" if table.by_position else table.task,
        f"{what}, by {where} (log)",
        [p.Line(s, [(x, v.mean) for x, v in paths[s]], *styles[s]) for s in ordered],
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
    """A Vega-Lite document: each task's curves beside its table, which is also their legend."""
    tables, drawn = lab_tables(scores), []
    labels = [*dict.fromkeys(label for table in tables for label in table.labels)]
    for table in tables:
        rows = [
            {"label": s, "x": x, "mean": at.mean, "low": at.low, "high": at.high, "seeds": at.n}
            for s, path in table.curves.items()
            for x, at in path
        ]
        beside = [_table(table, labels)]
        if len({r["x"] for r in rows}) > 1:
            what = "position in the longest text" if table.by_position else "test length"
            x = v.axis("x", f"{what} (tokens)", "log2", **charts.length_ticks(rows, table.ticks))
            y = v.axis("mean", "exact answers", ends={"domain": [0, 1]})
            y = charts.loss_axis(rows, "loss (nats per byte)") if table.by_loss else y
            look = {"first": 1, "size": 9 if table.by_position else 40, "shade": 0.16}
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
    """The table, its cells tinted by value, with each scheme's stroke before its name."""
    rows = [
        {"label": s, "length": n, "reason": shown.reason}
        | {"text": f"{shown.value} {shown.interval}", "best": bool(shown.mark)}
        | {"mean": value and value.mean, "seeds": value.n if value else 0}
        for (s, n), value in table.cells.items()
        for shown in [table.cell(s, n)]
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
    height = 24 if len(table.labels) > 8 else 32
    size = {"width": 78 * len(table.lengths), "height": height * len(table.labels)}
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
