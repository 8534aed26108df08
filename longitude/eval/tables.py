"""Measurements as tables: one per metric, methods by length, with what is significantly different.

Every comparison is paired: on the same documents for losses, on the same questions for answers. Two
methods are tied when the 95 % interval of their paired difference contains zero (or there is no
interval, with one document or none in common). Of rows with the same key the newest counts. All
rows are of one model and one protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longitude.eval.records import BASELINE, CONTEXT, COST, LOSS, RETRIEVAL, Measurement, of
from longitude.eval.stats import Interval, over_documents
from longitude.eval.tasks import Metric, metrics

Unit = tuple[str, ...]  # a document or a question: comparisons are paired by it
Place = tuple[str, int]  # a label and a length
SANE = 0.5  # nats above the baseline's loss in its window, up to which a loss is sane


@dataclass
class Results:
    """The numbers of one metric by label and length, then by document or question."""

    metric: Metric
    numbers: dict[Place, dict[Unit, Any]] = field(default_factory=dict)
    refused: dict[Place, str] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({length for _, length in {**self.numbers, **self.refused}}))

    def interval(self, place: Place) -> Interval:
        return self.metric.summarise([*self.numbers[place].values()])

    def difference(self, a: Place, b: Place) -> Interval | None:
        """a minus b on what both were measured on; None if they have nothing in common."""
        ours, theirs = self.numbers.get(a, {}), self.numbers.get(b, {})
        shared = [unit for unit in ours if unit in theirs]
        if not shared:
            return None
        return self.metric.difference([ours[u] for u in shared], [theirs[u] for u in shared])

    def tied(self, a: Place, b: Place) -> bool:
        """Whether two results are not significantly different."""
        if self.metric.tie is not None:
            ours, theirs = self.interval(a).mean, self.interval(b).mean
            return abs(ours - theirs) <= self.metric.tie * max(ours, theirs)
        gap = self.difference(a, b)
        return gap is None or not gap.clear


@dataclass(frozen=True)
class Cell:
    """One method at one length: its value, or why it has none. `best`: its mean is best among the
    methods with the most documents, and means differ; `tied`: not significantly different from
    the best. `over`: the paired difference to the baseline."""

    value: Interval | None
    refused: str | None
    best: bool
    tied: bool
    over: Interval | None


@dataclass(frozen=True)
class ResultTable:
    """One metric: methods (the baseline first) by length."""

    metric: Metric
    trained: int
    labels: tuple[str, ...]
    lengths: tuple[int, ...]
    cells: Mapping[Place, Cell]


def labels(rows: Iterable[Measurement]) -> dict[str, str]:
    """The label of each scheme, the baseline first, then in order of first appearance. Schemes
    that share a label are named by their written forms."""
    named: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: not row.is_baseline):
        named.setdefault(row.key.scheme, row.label)
    used = [*named.values()]
    return {scheme: s if used.count(s) == 1 else scheme for scheme, s in named.items()}


def results(rows: Iterable[Measurement], metric: Metric, names: Mapping[str, str]) -> Results:
    """The numbers of one metric, by label, length and document or question."""
    rows, out = of(rows, metric.rows), Results(metric)
    for row in _youngest(rows):
        for length, unit, number in _numbers(row, metric):
            out.numbers.setdefault((names[row.key.scheme], length), {})[unit] = number
    for row in rows:
        if row.refused:  # a refusal counts for every length that the row would have covered
            covered = {row.key.length, *(out.lengths if metric.covers_shorter else ())}
            places = [(names[row.key.scheme], n) for n in covered if n <= row.key.length]
            out.refused |= {p: str(row.refused) for p in places if p not in out.numbers}
    return out


def _youngest(rows: Iterable[Measurement]) -> Iterator[Measurement]:
    """The rows that have numbers: the newest of each key, and the shortest length last, so that its
    means replace those of longer runs. (A scheme whose frequencies depend on the total length is
    run once per length, and its longer runs say nothing about a shorter one.)"""
    last = {
        (row.key.measure, row.key.scheme, row.key.length, _unit(row)): row
        for row in sorted(rows, key=lambda row: row.made)
    }
    by_length = sorted(last.values(), key=lambda row: -row.key.length)
    return (row for row in by_length if not row.refused)


def _unit(row: Measurement) -> Unit:
    """The document, grid cell and seed of a row, by which methods are paired."""
    text = row.key.text.digest if row.key.text else ""
    return text, json.dumps(dict(row.key.at), sort_keys=True), str(row.key.seed)


def _numbers(row: Measurement, metric: Metric) -> Iterator[tuple[int, Unit, Any]]:
    """Yield (length, unit, number); a row of answers or of means holds several."""
    value, unit, length = row.value.get(metric.field), _unit(row), row.key.length
    if metric.covers_shorter:
        yield from ((n, unit, mean) for n, mean in value or ())
    elif isinstance(value, list):
        yield from ((length, (*unit, str(i)), v) for i, v in enumerate(value))
    elif value is not None:
        yield length, unit, float(value)


def result_tables(rows: Iterable[Measurement]) -> dict[str, ResultTable]:
    """The tables of all metrics that have rows, by name."""
    rows = [*rows]
    return {name: table for name in metrics() if (table := result_table(rows, name))}


def result_table(rows: Sequence[Measurement], name: str) -> ResultTable | None:
    """One metric's table; None if it has no rows."""
    metric, names = metrics()[name], labels(rows)
    rows = of(rows, metric.rows)
    numbers = results(rows, metric, names)
    if not numbers.lengths:
        return None
    present = {row.key.scheme for row in rows}
    methods = tuple(label for scheme, label in names.items() if scheme in present)
    baseline = next((names[row.key.scheme] for row in rows if row.is_baseline), BASELINE)
    cells: dict[Place, Cell] = {}
    for length in numbers.lengths:
        measured = {s: units for s in methods if (units := numbers.numbers.get((s, length)))}
        values = {s: numbers.interval((s, length)) for s in measured}
        largest = max(map(len, measured.values()), default=0)
        means = {s: values[s].mean for s, units in measured.items() if len(units) == largest}
        choose = min if metric.lower_is_better else max
        best = choose(means, key=means.__getitem__, default="")
        differ = len({value.mean for value in values.values()}) > 1
        for s in methods:
            place, value = (s, length), values.get(s)
            top = differ and means.get(s) == means[best]
            tied = differ and value is not None and not top and numbers.tied(place, (best, length))
            over = None if s == baseline else numbers.difference(place, (baseline, length))
            cells[place] = Cell(value, numbers.refused.get(place), top, tied, over)
    trained = rows[0].key.subject.trained
    return ResultTable(metric, trained, methods, numbers.lengths, cells)


def curves(rows: Sequence[Measurement]) -> dict[str, list[tuple[int, int, Interval]]]:
    """Loss by position: (first, past, loss) of each bin, from the longest text of each method."""
    names = labels(rows)
    longest: dict[str, dict[int, dict[tuple[int, int], dict[Unit, float]]]] = {}
    for row in _youngest(of(rows, LOSS)):
        bins = longest.setdefault(names[row.key.scheme], {}).setdefault(row.key.length, {})
        for first, past, loss in row.value["bins"]:
            bins.setdefault((first, past), {})[_unit(row)] = loss
    return {
        name: [
            (first, past, over_documents([*losses.values()]))
            for (first, past), losses in sorted(lengths[max(lengths)].items())
        ]
        for name, lengths in longest.items()
    }


def by_family(
    rows: Sequence[Measurement], metric: str = RETRIEVAL
) -> dict[str, dict[tuple[str, int], Interval]]:
    """By method: the interval of the answers to each family of questions at each length."""
    names, spec = labels(rows), metrics()[metric]
    values: dict[str, dict[tuple[str, int], dict[Unit, Any]]] = {}
    for row in _youngest(of(rows, RETRIEVAL)):
        cells = values.setdefault(names[row.key.scheme], {})
        cell = cells.setdefault((str(row.key.at["family"]), row.key.length), {})
        cell.update((unit, value) for _, unit, value in _numbers(row, spec))
    return {
        label: {cell: spec.summarise([*units.values()]) for cell, units in sorted(cells.items())}
        for label, cells in values.items()
    }


def insane(rows: Sequence[Measurement]) -> set[Place]:
    """Where (label and length) a loss is more than half a nat above the baseline's in its window,
    so that what the method keeps or gains there is meaningless."""
    table = result_table(rows, CONTEXT) or result_table(rows, LOSS)
    if table is None:
        return set()
    means = {place: cell.value.mean for place, cell in table.cells.items() if cell.value}
    baseline = str(labels(rows).get(rows[0].key.subject.scheme))
    limit = means.get((baseline, table.trained), math.inf) + SANE
    return {place for place, mean in means.items() if mean > limit}


def in_window_cost(rows: Sequence[Measurement]) -> dict[str, Interval]:
    """What each method costs inside the trained window: its loss there (at the longest length that
    fits and that the baseline has a loss for) minus the baseline's."""
    if (table := result_table(rows, LOSS)) is None:
        return {}
    overs = {place: cell.over for place, cell in table.cells.items() if cell.over}
    inside = max((n for _, n in overs if n <= table.trained), default=None)
    return {s: over for (s, n), over in overs.items() if n == inside}


def relative_speed(
    rows: Sequence[Measurement], label: str, length: int, field: str = "speed"
) -> Interval | None:
    """Speed relative to the baseline's: the median over alternating rounds and their range; for
    older rows, which have no rounds, the ratio of the prefill speeds."""
    names = labels(rows)
    costs = {names[r.key.scheme]: r for r in _youngest(of(rows, COST)) if r.key.length == length}
    ours, baseline = costs.get(label), next((r for r in costs.values() if r.is_baseline), None)
    if ours and (speed := ours.value.get(field)):
        return Interval(*speed, n=ours.value["rounds"])
    if ours is None or baseline is None or field != "speed":
        return None
    ratio = ours.value["prefill"] / baseline.value["prefill"]
    return Interval(ratio, ratio, ratio, n=1)
