"""The results of `longitude extend` and `tune` for one model: what the terminal, the page, the
summary and the charts all show.

Every number is printed once, by its metric's format. Texts from outside (names, labels, refusals)
become printable here, and are escaped where they are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from longitude.core.validate import UserError
from longitude.eval import tables as t
from longitude.eval.records import CONTEXT, KEPT, LOSS, PAST_WINDOW, Measurement, Subject, of
from longitude.eval.stats import Interval
from longitude.eval.tasks import metrics
from longitude.viz.result_charts import INSANE
from longitude.viz.terminal import BEST, TIED, Cell
from longitude.viz.text import NOTHING, printable

if TYPE_CHECKING:
    from longitude.extension.distance_map import MapPoint

DAGGER = INSANE[0]
OVER, LENGTH, COST = "over baseline", "effective length", "in-window cost"  # not metrics


@dataclass(frozen=True)
class Column:
    """A column of the table of methods; `note` explains it under the terminal's table."""

    name: str
    title: str
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """What was measured on one model, what is recommended, and the commands to run next.

    `maps` has the distance map of each label, `by_size` the labels whose map depends on the head
    size, and `run` distinguishes sections of one model.
    """

    rows: Sequence[Measurement]
    recommendation: Mapping[str, Any] = field(default_factory=dict)
    next_steps: Sequence[tuple[str, str]] = ()
    maps: Mapping[str, Sequence[MapPoint]] = field(default_factory=dict)
    run: str = ""
    by_size: Collection[str] = ()

    @property
    def subject(self) -> Subject:
        return self.rows[0].key.subject

    @property
    def title(self) -> str:
        return f"{self.subject.name} ({self.run})" if self.run else self.subject.name

    @property
    def target(self) -> int:
        return max(row.key.length for row in self.rows)

    @cached_property
    def tables(self) -> dict[str, t.ResultTable]:
        return t.result_tables(self.rows)

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, int, Interval]]]:
        return t.curves(self.rows)

    @cached_property
    def in_window_cost(self) -> dict[str, Interval]:
        return t.in_window_cost(self.rows)

    @property
    def effective_length(self) -> Mapping[str, int]:
        return self.recommendation.get("effective_length") or {}

    @cached_property
    def answers(self) -> dict[str, dict[tuple[str, int], Interval]]:
        """By method: the share of exact answers to each family of questions, at each length."""
        return t.by_family(self.rows)

    @cached_property
    def schemes(self) -> dict[str, str]:
        """The scheme of each label, the baseline first."""
        return {label: scheme for scheme, label in t.labels(self.rows).items()}

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.schemes)

    @property
    def main(self) -> t.ResultTable | None:
        """The table that ranks the methods: kept context, or else the first metric there is."""
        names = (KEPT, CONTEXT, LOSS, *(name for name, m in metrics().items() if m.is_share))
        return next((self.tables[m] for m in names if m in self.tables), None)

    @property
    def ranked(self) -> list[str]:
        """Labels: the recommended one, then by effective length, then by the main metric at the
        target; labels without a number come last."""
        main = self.main
        higher_is_better = main is not None and not main.metric.lower_is_better

        def key(label: str) -> tuple[bool, int, float]:
            cell = self._last(main, label) if main else None
            mean = cell.value.mean if cell and cell.value else math.inf
            score = -mean if higher_is_better and math.isfinite(mean) else mean
            return label != self.best, -self.effective_length.get(label, 0), score

        return sorted(self.labels, key=key)

    @property
    def best(self) -> str | None:
        return (self.recommendation.get("best") or {}).get("label")

    @property
    def baseline(self) -> str | None:
        """The baseline's label, if it was measured."""
        return self.labels[0] if any(row.is_baseline for row in self.rows) else None

    @cached_property
    def columns(self) -> list[Column]:
        """The columns of the table of methods, the most important first."""
        at, context = f"at {self.target:,}", self.tables.get(CONTEXT)
        cost, columns = "nats per token, inside the window", []
        for name, m in metrics().items():
            if name in self.tables and not (name in (LOSS, PAST_WINDOW) and context):
                note = f"{m.heading}: {m.title[:1].lower()}{m.title[1:]} ({m.unit})"
                columns.append(Column(name, m.heading, f"{m.unit}, {at}", note))
            if name == CONTEXT and context and any(c.over for c in context.cells.values()):
                columns.append(Column(OVER, OVER, f"nats per token, {at}"))
            if name == KEPT and self.effective_length:
                note = f"{LENGTH}: the most tokens of which as much is kept as the baseline keeps"
                columns.append(Column(LENGTH, LENGTH, "tokens", f"{note} at its window's end"))
            if name == CONTEXT and self.in_window_cost:
                note = f"{COST}: over the baseline's loss, {cost}"
                columns.append(Column(COST, COST, cost, note))
        return columns

    def shown(self, label: str, column: str) -> Cell:
        """One cell of the table of methods."""
        if column == COST:
            return signed(self.in_window_cost.get(label))
        if column == LENGTH:
            reach = self.effective_length.get(label)
            return Cell(f"{reach:,}" if reach else NOTHING)
        if column == OVER:
            cell = self._last(self.tables[CONTEXT], label)
            return signed(cell.over if cell else None)
        return self.cell(self.tables[column], label, self._length(self.tables[column]))

    def cell(self, table: t.ResultTable, label: str, length: int) -> Cell:
        """A cell of a metric's table as printed, with a sign if its share is meaningless."""
        cell = table.cells.get((label, length))
        sign = DAGGER if table.metric.name == KEPT and (label, length) in self.insane else ""
        if cell is None or cell.value is None:
            return Cell(NOTHING if cell else "", reason=cell.refused if cell else None, sign=sign)
        fmt = table.metric.format
        mean, low, high = (fmt(x) for x in (cell.value.mean, cell.value.low, cell.value.high))
        interval = "" if cell.value.low == cell.value.high else f"{low.removesuffix(' %')} – {high}"
        return Cell(mean, interval, BEST if cell.best else TIED if cell.tied else "", sign=sign)

    @cached_property
    def insane(self) -> set[t.Place]:
        """Where (label and length) a loss is so high that the share kept is meaningless."""
        return t.insane(self.rows)

    @property
    def any_insane(self) -> bool:
        """Whether a kept share has to be marked."""
        return KEPT in self.tables and bool(self.insane & self.tables[KEPT].cells.keys())

    def remarks(self) -> list[str]:
        """Why numbers are missing, each reason once; and which methods forget."""
        where: dict[str, dict[str, set[int]]] = {}
        names = t.labels(self.rows)
        for row in (row for row in self.rows if row.refused):
            by_label = where.setdefault(row.refused or "", {})
            by_label.setdefault(names[row.key.scheme], set()).add(row.key.length)
        reasons = []
        for why, who in where.items():
            at = (f"{s} at {', '.join(f'{n:,}' for n in sorted(ns))}" for s, ns in who.items())
            reasons.append(f"{'; '.join(at)}: {why}")
        forget = [s for s in self.recommendation.get("forgets", ()) if s in self.schemes]
        note = f"{', '.join(forget)}: forgets (keeps nothing at {self.target:,} tokens)"
        return [*reasons, note] if forget else reasons

    def machines(self) -> list[str]:
        lines = (printable(_line(row.value.get("machine"))) for row in self.rows)
        return [*dict.fromkeys(line for line in lines if line)]

    def protocols(self, measure: str) -> str:
        """The settings of a measurement that another run could choose differently."""
        rows = of(self.rows, metrics()[measure].rows if measure in metrics() else measure)
        lines = (printable(_line({**r.key.protocol, "seed": r.key.seed})) for r in rows)
        return "; ".join(dict.fromkeys(lines))

    def _length(self, table: t.ResultTable) -> int:
        return self.target if self.target in table.lengths else max(table.lengths)

    def _last(self, table: t.ResultTable, label: str) -> t.Cell | None:
        return table.cells.get((label, self._length(table)))

    # what is recommended

    @property
    def headline(self) -> tuple[str, str]:
        """The best recommendation, and the numbers behind it."""
        best = self.recommendation.get("best") or {}
        head, _, why = printable(best.get("sentence", "")).partition(". ")
        return head, why

    def advice(self) -> Iterator[tuple[str, str]]:
        """Each recommendation: its purpose, and a sentence. Other goals are included if a method
        serves them; runtimes with the same sentence are joined in one."""
        recommended = self.recommendation
        if best := recommended.get("best"):
            yield printable(best["what"]), printable(best["sentence"])
        for other in recommended.get("goals", ()):
            if other["label"] not in (None, self.baseline):  # there is something to do for it
                yield printable(other["what"]), printable(other["sentence"])
        groups: dict[str, list[str]] = {}  # names by sentence, with \0 in place of the name
        for entry in recommended.get("runtimes", ()) if recommended.get("helps", True) else ():
            numbers, sentence = entry.get("numbers") or {}, entry["sentence"]
            if numbers.get("own") is not None and numbers.get("label") == numbers.get("own"):
                sentence = sentence.partition(". ")[0].rstrip(".") + "."  # the baseline's numbers
            match = re.search(re.escape(entry["what"]), sentence, re.IGNORECASE)
            name = match[0] if match else entry["what"]
            groups.setdefault(sentence.replace(name, "\0"), []).append(name)
        for sentence, names in groups.items():
            last = f" {'or' if sentence.startswith('Nothing') else 'and'} {names[-1]}"
            joined = names[0] if len(names) == 1 else ", ".join(names[:-1]) + last
            what = names[0] if len(names) == 1 else "runtimes"
            yield printable(what), printable(sentence.replace("\0", joined))
        if factor := recommended.get("factor"):
            yield printable(factor["what"]), printable(factor["sentence"])

    @property
    def notes(self) -> list[str]:
        """What the run left out or did differently."""
        return [printable(str(note)) for note in self.recommendation.get("notes", ())]

    @property
    def searches(self) -> list[tuple[str, str]]:
        """The results of a search: a sentence, and the better scheme if there is one."""
        results = []
        for result in self.recommendation.get("search") or ():
            text = printable(result["sentence"])
            text = text[:1].upper() + text[1:] if text.startswith("no ") else text  # not a label
            results.append((text, printable(result["scheme"]) if result["better"] else ""))
        return results

    @property
    def lm_eval(self) -> tuple[list[str], list[list[str]]] | None:
        """lm-eval's scores: the heads, then a row for each task and metric; methods are columns."""
        by_label = self.recommendation.get("lm_eval") or {}
        every = (scores.items() for scores in by_label.values())
        tasks = [(task, metric) for scores in every for task, values in scores for metric in values]
        rows = []
        for task, metric in dict.fromkeys(tasks):
            values = [results.get(task, {}).get(metric) for results in by_label.values()]
            texts = ["" if value is None else f"{value:.4g}" for value in values]
            rows.append([printable(f"{task}, {metric}"), *texts])
        return (["task", *map(printable, by_label)], rows) if rows else None


def section(
    rows: Sequence[Measurement],
    recommendation: Mapping[str, Any] | None = None,
    next_steps: Sequence[tuple[str, str]] = (),
    maps: Mapping[str, Sequence[MapPoint]] | None = None,
    run: str = "",
    by_size: Collection[str] = (),
) -> Section:
    """One model's measurements as a section; the recommendation's next steps are the default."""
    if not rows:
        raise UserError("There are no measurements to report, but got 0 rows: measure some first.")
    if len({row.key.subject for row in rows}) > 1:
        raise UserError("A section is of one model, but got rows of several: make one for each.")
    advice = recommendation or {}
    steps = next_steps or [(n["title"], n["command"]) for n in advice.get("next", ())]
    safe = []  # rows with every text from outside on one line and printable
    for row in rows:
        subject, text = row.key.subject, row.key.text
        names = {"name": printable(subject.name), "scheme": printable(subject.scheme)}
        text = text and replace(text, name=printable(text.name))
        scheme, subject = printable(row.key.scheme), replace(subject, **names)
        key = replace(row.key, scheme=scheme, subject=subject, text=text)
        texts = {"label": printable(row.label), "refused": row.refused and printable(row.refused)}
        safe.append(replace(row, key=key, value={**row.value, **texts}))
    return Section(safe, advice, tuple(steps), maps or {}, run, by_size)


def signed(value: Interval | None) -> Cell:
    """A difference with its sign and interval."""
    if value is None:
        return Cell("")
    mean, low, high = (f"{x:+z.3f}" for x in (value.mean, value.low, value.high))  # z: no -0.000
    return Cell(mean, "" if low == high else f"{low} – {high}")


def _line(value: Any) -> str:
    """A mapping as a line: name value, name value …"""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_line(v)}" for k, v in sorted(value.items()) if v not in (None, ""))
    if isinstance(value, list | tuple):
        return " ".join(map(_line, value))
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)
