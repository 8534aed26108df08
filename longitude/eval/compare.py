"""Rows beside each other: a board a measure, curves, grids, and what can't be told apart.

Every comparison is paired: on the same documents for losses, on the same questions for answers. Two
methods are tied when the 95 % interval of their paired difference holds zero (or nothing can be
said, with one document or none in common). Costs are taken once, so that they have no interval: two
are tied when less than 5 % apart, as timings are that are repeated.

What is asked twice counts once, with the younger answer; rows are of one model and one protocol.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longitude.eval.rows import (
    CONTEXT,
    COST,
    KEYS,
    LOSS,
    PASSKEY,
    UNTOUCHED,
    VARIABLES,
    Measured,
    of,
)
from longitude.eval.statistics import Interval as Interval
from longitude.eval.statistics import matched, over_documents, paired, share

NOISE = 0.05  # costs that are no further apart are tied
Unit = tuple[str, ...]  # a document or a question: what two methods are paired by
Numbers = dict[Unit, float]
Place = tuple[str, int]  # a label and a length


class Kind(NamedTuple):
    """What a board shows: which field of which rows, and how it is read."""

    measure: str
    field: str
    title: str
    unit: str
    lower_is_better: bool


KINDS = {
    "loss": Kind(LOSS, "means", "Loss of the first tokens", "nats a token", True),
    "context": Kind(CONTEXT, "loss", "Loss of the same last tokens", "nats a token", True),
    "passkey": Kind(PASSKEY, "right", "Passkeys told", "share", False),
    "keys": Kind(KEYS, "right", "One key of many told", "share", False),
    "variables": Kind(VARIABLES, "right", "Variables followed", "share", False),
    "prefill": Kind(COST, "prefill", "Prefill", "tokens a second", False),
    "decode": Kind(COST, "decode", "Decoding", "milliseconds a token", True),
    "memory": Kind(COST, "peak", "Peak memory", "bytes", True),
}


@dataclass(frozen=True)
class Cell:
    """One method at one length: its number, or why it has none. `best`: none has a better mean;
    `tied`: another's is better, but can't be told from it. `over` is the paired difference to the
    untouched model, this less that."""

    value: Interval | None
    refused: str | None
    best: bool
    tied: bool
    over: Interval | None


@dataclass(frozen=True)
class Board:
    """One measure: methods (the untouched model first) by length."""

    measure: str
    title: str
    unit: str
    lower_is_better: bool
    trained: int
    labels: tuple[str, ...]
    schemes: Mapping[str, str]
    lengths: tuple[int, ...]
    cells: Mapping[Place, Cell]


@dataclass
class Sheet:
    """The numbers of one board as they were measured, by document or question."""

    kind: Kind
    numbers: dict[Place, Numbers] = field(default_factory=dict)
    refused: dict[Place, str] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({length for _, length in {**self.numbers, **self.refused}}))

    def interval(self, place: Place) -> Interval:
        values = [*self.numbers[place].values()]
        return share(values) if self.kind.field == "right" else over_documents(values)

    def difference(self, a: Place, b: Place) -> Interval | None:
        """a less b on what both were measured on; None where that is nothing."""
        ours, theirs = self.numbers.get(a, {}), self.numbers.get(b, {})
        both = [unit for unit in ours if unit in theirs]
        if not both:
            return None
        how = matched if self.kind.field == "right" else paired
        return how([ours[unit] for unit in both], [theirs[unit] for unit in both])

    def tied(self, a: Place, b: Place) -> bool:
        """Whether two can't be told apart."""
        if self.kind.measure == COST:
            ours, theirs = self.interval(a).mean, self.interval(b).mean
            return abs(ours - theirs) <= NOISE * max(ours, theirs)
        gap = self.difference(a, b)
        return gap is None or not gap.clear


def boards(found: Iterable[Measured]) -> dict[str, Board]:
    """Every measure that has rows, as a board."""
    rows = [*found]
    return {name: made for name in KINDS if (made := board(rows, name))}


def board(found: Iterable[Measured], name: str) -> Board | None:
    """One measure's board, by its name among KINDS, if it has rows."""
    rows = [*found]
    kind, names = KINDS[name], labels(rows)
    of_kind = of(rows, kind.measure)
    made = sheet(of_kind, kind, names)
    return _board(name, made, of_kind, names) if made.lengths else None


def labels(found: Iterable[Measured]) -> dict[str, str]:
    """What each scheme is called, the untouched model first, then in order of first appearance.
    Two schemes under one label go by their written forms."""
    rows = [*found]
    named: dict[str, str] = {}
    for one in sorted(rows, key=lambda one: not one.untouched):
        named.setdefault(one.asked.scheme, one.label)
    twice = [*named.values()]
    return {scheme: s if twice.count(s) == 1 else scheme for scheme, s in named.items()}


def curves(found: Iterable[Measured]) -> dict[str, list[tuple[int, int, Interval]]]:
    """Loss by position: (first, past, loss) of each bin, from the longest text each was read on."""
    rows = [*found]
    longest: dict[str, dict[int, dict[tuple[int, int], Numbers]]] = {}
    for name, one in _answered(of(rows, LOSS), labels(rows)):
        bins = longest.setdefault(name, {}).setdefault(one.asked.length, {})
        for first, past, loss in one.value["bins"]:
            bins.setdefault((first, past), {})[_unit(one)] = loss
    return {
        name: [
            (first, past, over_documents([*losses.values()]))
            for (first, past), losses in sorted(lengths[max(lengths)].items())
        ]
        for name, lengths in longest.items()
    }


def grid(found: Iterable[Measured], label: str) -> dict[tuple[int, float], Interval]:
    """One method's share of passkeys told, by length and depth."""
    rows = [*found]
    answers: dict[tuple[int, float], Numbers] = {}
    for name, one in _answered(of(rows, PASSKEY), labels(rows)):
        if name == label:
            place = one.asked.length, float(one.asked.at["depth"])
            answers.setdefault(place, {}).update((u, v) for _, u, v in _numbers(one, "right"))
    return {place: share([*right.values()]) for place, right in sorted(answers.items())}


def tax(found: Iterable[Measured]) -> dict[str, Interval]:
    """What each method costs inside the trained window: its loss there (of the most tokens that
    fit and that the untouched model has a loss for) less the untouched model's."""
    made = board(found, "loss")
    if made is None:
        return {}
    overs = {place: cell.over for place, cell in made.cells.items() if cell.over}
    inside = max((n for _, n in overs if n <= made.trained), default=None)
    return {s: over for (s, n), over in overs.items() if n == inside}


def reach(found: Iterable[Measured], share: float = 0.8) -> dict[str, int | None]:
    """The longest length such that it, and every shorter one asked, has this share of passkeys."""
    made = board(found, "passkey")
    return {s: _reached(made, s, share) for s in made.labels} if made else {}


def sheet(rows: Sequence[Measured], kind: Kind, names: Mapping[str, str]) -> Sheet:
    """The numbers of one kind, by label, length and document."""
    made = Sheet(kind)
    for name, one in _answered(rows, names):
        for length, unit, value in _numbers(one, kind.field):
            made.numbers.setdefault((name, length), {})[unit] = value
    for one in rows:
        if one.refused:
            _refuse(made, names[one.asked.scheme], one)
    return made


def _refuse(made: Sheet, name: str, one: Measured) -> None:
    """Enter a refusal where there are no numbers; a reading's is for all it would have told."""
    lengths = {one.asked.length, *(made.lengths if made.kind.field == "means" else ())}
    for length in lengths:
        if length <= one.asked.length and (name, length) not in made.numbers:
            made.refused[name, length] = str(one.refused)


def _board(name: str, sheet: Sheet, rows: Sequence[Measured], names: Mapping[str, str]) -> Board:
    asked = {one.asked.scheme for one in rows}
    schemes = {label: scheme for scheme, label in names.items() if scheme in asked}
    own = next((names[one.asked.scheme] for one in rows if one.untouched), UNTOUCHED)
    cells: dict[Place, Cell] = {}
    for length in sheet.lengths:
        cells |= _column(sheet, [*schemes], length, own)
    return Board(
        measure=name,
        title=sheet.kind.title,
        unit=sheet.kind.unit,
        lower_is_better=sheet.kind.lower_is_better,
        trained=rows[0].asked.subject.trained,
        labels=(*schemes,),
        schemes=schemes,
        lengths=sheet.lengths,
        cells=cells,
    )


def _column(sheet: Sheet, names: Sequence[str], length: int, own: str) -> dict[Place, Cell]:
    """All methods at one length."""
    values = {s: sheet.interval((s, length)) for s in names if (s, length) in sheet.numbers}
    pick = min if sheet.kind.lower_is_better else max
    best = pick(values, key=lambda s: values[s].mean, default=None)
    cells: dict[Place, Cell] = {}
    for s in names:
        place, value = (s, length), values.get(s)
        top = best is not None and value is not None and value.mean == values[best].mean
        tied = value is not None and not top and sheet.tied(place, (str(best), length))
        over = None if s == own else sheet.difference(place, (own, length))
        cells[place] = Cell(value, sheet.refused.get(place), top, tied, over)
    return cells


def _reached(board: Board, label: str, least: float) -> int | None:
    reached = None
    for length in board.lengths:
        value, refused = board.cells[label, length].value, board.cells[label, length].refused
        if refused or (value and value.mean < least):
            break
        reached = length if value else reached
    return reached


def _answered(
    found: Iterable[Measured], names: Mapping[str, str]
) -> Iterator[tuple[str, Measured]]:
    """The rows that have numbers, each with its label: the youngest of those that ask the same, and
    the shortest reading last, for its means to count. (A scheme that depends on the length of the
    whole is read once a length, and its longer readings say nothing about a shorter one.)"""
    last = {_question(one): one for one in sorted(found, key=lambda one: one.made)}
    return (
        (names[one.asked.scheme], one)
        for one in sorted(last.values(), key=lambda one: -one.asked.length)
        if not one.refused
    )


def _question(one: Measured) -> tuple[str, str, int, Unit]:
    return one.asked.measure, one.asked.scheme, one.asked.length, _unit(one)


def _unit(one: Measured) -> Unit:
    """The document or the place in a grid, whatever method is asked."""
    text = one.asked.text.digest if one.asked.text else ""
    at = json.dumps(dict(one.asked.at), sort_keys=True)
    return text, at, str(one.asked.seed)


def _numbers(one: Measured, field: str) -> Iterator[tuple[int, Unit, float]]:
    """Length, document or question, and number: several in a row of answers or of means."""
    value, unit, length = one.value.get(field), _unit(one), one.asked.length
    if field == "means":
        yield from ((n, unit, mean) for n, mean in one.value["means"])
    elif field == "right":
        yield from ((length, (*unit, str(i)), float(r)) for i, r in enumerate(one.value["right"]))
    elif value is not None:
        yield length, unit, float(value)
