"""Rows beside each other: a board a measure, curves, grids, and what can't be told apart.

Every comparison is paired: on the same documents for losses, on the same questions for answers. Two
methods are tied when the 95 % interval of their paired difference holds zero (or nothing can be
said, with one document or none in common). Costs are taken once, so that they have no interval: two
are tied when less than 5 % apart, as timings are that are repeated. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from longitude.eval.records import BASELINE, LOSS, PASSKEY, Measurement, of
from longitude.eval.results import KINDS, Numbers, Place, Sheet, answered, numbers, sheet, unit
from longitude.eval.results import labels as labels
from longitude.eval.stats import Interval as Interval
from longitude.eval.stats import over_documents, share


@dataclass(frozen=True)
class Cell:
    """One method at one length: its number, or why it has none. `best`: none has a better mean
    (on what all were measured on), and some have worse; `tied`: one has, but the two can't be told
    apart. `over`: the paired difference to the untouched model, this less that."""

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


def boards(found: Iterable[Measurement]) -> dict[str, Board]:
    """Every measure that has rows, as a board."""
    rows = [*found]
    return {name: made for name in KINDS if (made := board(rows, name))}


def board(found: Iterable[Measurement], name: str) -> Board | None:
    """One measure's board, by its name among KINDS, if it has rows."""
    rows = [*found]
    kind, names = KINDS[name], labels(rows)
    of_kind = of(rows, kind.measure)
    made = sheet(of_kind, kind, names)
    return _board(name, made, of_kind, names) if made.lengths else None


def curves(found: Iterable[Measurement]) -> dict[str, list[tuple[int, int, Interval]]]:
    """Loss by position: (first, past, loss) of each bin, from the longest text each was read on."""
    rows = [*found]
    longest: dict[str, dict[int, dict[tuple[int, int], Numbers]]] = {}
    for name, one in answered(of(rows, LOSS), labels(rows)):
        bins = longest.setdefault(name, {}).setdefault(one.key.length, {})
        for first, past, loss in one.value["bins"]:
            bins.setdefault((first, past), {})[unit(one)] = loss
    return {
        name: [
            (first, past, over_documents([*losses.values()]))
            for (first, past), losses in sorted(lengths[max(lengths)].items())
        ]
        for name, lengths in longest.items()
    }


def grid(found: Iterable[Measurement], label: str) -> dict[tuple[int, float], Interval]:
    """One method's share of passkeys told, by length and depth."""
    rows = [*found]
    answers: dict[tuple[int, float], Numbers] = {}
    for name, one in answered(of(rows, PASSKEY), labels(rows)):
        if name == label:
            place = one.key.length, float(one.key.at["depth"])
            answers.setdefault(place, {}).update((u, v) for _, u, v in numbers(one, "right"))
    return {place: share([*right.values()]) for place, right in sorted(answers.items())}


def tax(found: Iterable[Measurement]) -> dict[str, Interval]:
    """What each method costs inside the trained window: its loss there (of the most tokens that
    fit and that the untouched model has a loss for) less the untouched model's."""
    made = board(found, "loss")
    if made is None:
        return {}
    overs = {place: cell.over for place, cell in made.cells.items() if cell.over}
    inside = max((n for _, n in overs if n <= made.trained), default=None)
    return {s: over for (s, n), over in overs.items() if n == inside}


def reach(found: Iterable[Measurement], share: float = 0.8) -> dict[str, int | None]:
    """The longest length such that it, and every shorter one asked, has this share of passkeys."""
    made = board(found, "passkey")
    return {s: _reached(made, s, share) for s in made.labels} if made else {}


def _board(name: str, sheet: Sheet, rows: Sequence[Measurement], names: Mapping[str, str]) -> Board:
    asked = {one.key.scheme for one in rows}
    schemes = {label: scheme for scheme, label in names.items() if scheme in asked}
    own = next((names[one.key.scheme] for one in rows if one.is_baseline), BASELINE)
    cells: dict[Place, Cell] = {}
    for length in sheet.lengths:
        cells |= _column(sheet, [*schemes], length, own)
    return Board(
        measure=name,
        title=sheet.kind.title,
        unit=sheet.kind.unit,
        lower_is_better=sheet.kind.lower_is_better,
        trained=rows[0].key.subject.trained,
        labels=(*schemes,),
        schemes=schemes,
        lengths=sheet.lengths,
        cells=cells,
    )


def _column(sheet: Sheet, names: Sequence[str], length: int, own: str) -> dict[Place, Cell]:
    """All methods at one length."""
    means = sheet.means(names, length)
    best, worse = sheet.best(means), len({*means.values()}) > 1
    cells: dict[Place, Cell] = {}
    for s in names:
        place, known = (s, length), s in means
        top = worse and known and best is not None and means[s] == means[best]
        tied = worse and known and not top and sheet.tied(place, (str(best), length))
        over = None if s == own else sheet.difference(place, (own, length))
        value = sheet.interval(place) if known else None
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
