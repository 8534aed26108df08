"""One model's measurements as a reader wants them: every number printed once, the same everywhere.

The page, the summary, the charts and the terminal's table all read a section; texts from outside
(names, labels, refusals) lose here what a terminal would obey, and are escaped where they end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from longitude.eval.records import CONTEXT, LOSS, PASSKEY, Measurement, Subject, Text, of
from longitude.eval.stats import Interval
from longitude.eval.tables import (
    Cell,
    ResultTable,
    curves,
    effective_length,
    grid,
    in_window_cost,
    labels,
    result_tables,
)
from longitude.eval.tasks import metrics
from longitude.viz.text import NOTHING, printable

TIED, BEST = "tied", "best"
NEAR, DAGGER = "≈", "†"
NOT_ASKED = f"{DAGGER}: not asked, since none was retrieved at a shorter length; counts as none."
MapPoint = tuple[float, float | None, float | None]  # true distance, least and greatest believed


@dataclass(frozen=True)
class Shown:
    """A number as printed, its interval, whether it is the best or tied with it, why there is none,
    and a sign that leads to a note."""

    value: str
    swing: str = ""
    mark: str = ""
    why: str | None = None
    sign: str = ""


@dataclass(frozen=True)
class Column:
    """A column of the table of methods."""

    name: str
    title: str
    unit: str


@dataclass(frozen=True)
class Section:
    """What was measured on one model, what is recommended, and what to type next.

    `maps` has the distance map of each label, `by_size` those whose map depends on the size of a
    head, and `run` tells sections of one model apart.
    """

    found: Sequence[Measurement]
    recommendation: Mapping[str, Any] = field(default_factory=dict)
    what_next: Sequence[tuple[str, str]] = ()
    maps: Mapping[str, Sequence[MapPoint]] = field(default_factory=dict)
    run: str = ""
    by_size: Collection[str] = ()

    @property
    def subject(self) -> Subject:
        return self.found[0].key.subject

    @property
    def title(self) -> str:
        name = self.subject.name
        return f"{name} ({self.run})" if self.run else name

    @property
    def target(self) -> int:
        """The greatest length that was asked for."""
        return max(one.key.length for one in self.found)

    @cached_property
    def boards(self) -> dict[str, ResultTable]:
        return result_tables(self.found)

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, int, Interval]]]:
        return curves(self.found)

    @cached_property
    def tax(self) -> dict[str, Interval]:
        return in_window_cost(self.found)

    @cached_property
    def reach(self) -> dict[str, int | None]:
        return effective_length(self.found) if of(self.found, PASSKEY) else {}

    @cached_property
    def grids(self) -> dict[str, dict[tuple[int, float], Interval]]:
        """Passkeys by length and depth, of the labels that were asked for some."""
        named = self.boards["passkey"].labels if "passkey" in self.boards else ()
        found = {label: grid(self.found, label) for label in named}
        return {label: cells for label, cells in found.items() if cells}

    @cached_property
    def schemes(self) -> dict[str, str]:
        """Each label with its scheme, the untouched model first."""
        return {label: scheme for scheme, label in labels(self.found).items()}

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.schemes)

    @property
    def ranked(self) -> list[str]:
        """Labels from the best at the target to the worst; those without a number last."""
        board = self.main
        known = {s: c.value for s in self.labels if board and (c := self._last(board, s))}

        def place(label: str) -> float:
            value = known.get(label)
            up = 1 if board and board.lower_is_better else -1
            return up * value.mean if value else float("inf")

        return sorted(self.labels, key=place)

    @property
    def main(self) -> ResultTable | None:
        """The table that ranks the methods: context use, or the first of those that there are."""
        wanted = (CONTEXT, LOSS, *(name for name, m in metrics().items() if m.is_share))
        return next((self.boards[m] for m in wanted if m in self.boards), None)

    @property
    def best(self) -> str | None:
        """The recommended label."""
        return (self.recommendation.get("best") or {}).get("label")

    @property
    def texts(self) -> list[Text]:
        return [*dict.fromkeys(one.key.text for one in self.found if one.key.text)]

    def columns(self) -> list[Column]:
        """The columns of the table of methods, the most telling first."""
        at = f"at {self.target:,}"
        every = {
            CONTEXT: Column(CONTEXT, "context loss", f"nats, {at}"),
            "over": Column("over", "over baseline", f"nats, {at}"),
            PASSKEY: Column(PASSKEY, "passkeys", f"retrieved, {at}"),
            "reach": Column("reach", "effective length", "tokens with 80 % of passkeys"),
            "tax": Column("tax", "in-window cost", "nats, inside the window"),
        }
        if CONTEXT not in self.boards and LOSS in self.boards:
            every = {LOSS: Column(LOSS, "loss", f"nats, first {self.target:,}"), **every}
        for name, metric in metrics().items():
            if name != LOSS:
                every.setdefault(name, Column(name, metric.heading, f"{metric.unit}, {at}"))
        context = self.boards.get(CONTEXT)
        over = context is not None and any(c.over for c in context.cells.values())
        more = {"over": over, "reach": bool(self.reach), "tax": bool(self.tax)}
        there = {*self.boards, *(name for name, shown in more.items() if shown)}
        return [column for name, column in every.items() if name in there]

    @property
    def forgets(self) -> list[str]:
        """Labels of the methods that hide everything beyond their window."""
        return [s for s in self.recommendation.get("forgets", ()) if s in self.schemes]

    def shown(self, label: str, column: str) -> Shown:
        """One number of the table of methods."""
        if column == "tax":
            return _signed(self.tax.get(label))
        if column == "reach":
            far = self.reach.get(label)
            return Shown(f"{far:,}" if far else NOTHING)
        if column == "over":
            cell = self._last(self.boards["context"], label)
            return _signed(cell.over if cell else None)
        board = self.boards[column]
        return self.cell(board, label, self._at(board))

    def cell(self, board: ResultTable, label: str, length: int) -> Shown:
        """A cell of a board as printed, with a sign where nothing was asked."""
        sign = DAGGER if self.assumed(board.measure, label, length) else ""
        return replace(_shown(board, label, length), sign=sign)

    def assumed(self, measure: str, label: str, length: int) -> bool:
        """Whether a method was not asked, and is taken to have told none."""
        return (measure, label, length) in self._assumed

    @property
    def any_assumed(self) -> bool:
        return bool(self._assumed)

    @cached_property
    def _assumed(self) -> set[tuple[str, str, int]]:
        names = labels(self.found)
        rows = [one.key for one in self.found if one.value.get("assumed")]
        return {(asked.measure, names[asked.scheme], asked.length) for asked in rows}

    def refusals(self) -> list[str]:
        """Each reason once, with the methods and lengths that it is for."""
        where: dict[str, dict[str, list[int]]] = {}
        names = labels(self.found)
        for one in self.found:
            if one.refused:
                who = where.setdefault(one.refused, {})
                who.setdefault(names[one.key.scheme], []).append(one.key.length)
        return [
            "; ".join(
                f"{s} at {', '.join(f'{n:,}' for n in sorted({*at}))}" for s, at in who.items()
            )
            + f": {why}"
            for why, who in where.items()
        ]

    def machines(self) -> list[str]:
        """What it ran on, each once."""
        told = (printable(_told(one.value.get("machine"))) for one in self.found)
        return [*dict.fromkeys(t for t in told if t)]

    def protocols(self, measure: str) -> list[str]:
        """How a measure was taken: every count and cut that another run could choose otherwise."""
        rows = of(self.found, metrics()[measure].rows if measure in metrics() else measure)
        told = (printable(_told({**r.key.protocol, "seed": r.key.seed})) for r in rows)
        return [*dict.fromkeys(told)]

    def _at(self, board: ResultTable) -> int:
        return self.target if self.target in board.lengths else max(board.lengths)

    def _last(self, board: ResultTable, label: str) -> Cell | None:
        return board.cells.get((label, self._at(board)))


def _shown(board: ResultTable, label: str, length: int) -> Shown:
    cell = board.cells.get((label, length))
    if cell is None or cell.value is None:
        return Shown(NOTHING if cell else "", why=cell.refused if cell else None)
    mark = BEST if cell.best else TIED if cell.tied else ""
    value, swing = printed(board.measure, cell.value.mean), between(board.measure, cell.value)
    return Shown(value, swing, mark)


def printed(measure: str, value: float) -> str:
    """A number in its metric's own format."""
    return metrics()[measure].format(value)


def between(measure: str, value: Interval) -> str:
    """The ends of an interval; nothing where one number stands for itself."""
    if value.low == value.high:
        return ""
    low, high = printed(measure, value.low), printed(measure, value.high)
    return f"{low.removesuffix(' %')} – {high}"


def tidied(found: Sequence[Measurement]) -> list[Measurement]:
    """The measurements with every text from outside on one line and printable."""
    return [_tidy(one) for one in found]


def _tidy(one: Measurement) -> Measurement:
    subject, text = one.key.subject, one.key.text
    names = {"name": printable(subject.name), "scheme": printable(subject.scheme)}
    asked = replace(
        one.key,
        scheme=printable(one.key.scheme),
        subject=replace(subject, **names),
        text=text and replace(text, name=printable(text.name)),
    )
    refused = one.refused and printable(one.refused)
    value = {**one.value, "label": printable(one.label), "refused": refused}
    return replace(one, key=asked, value=value)


def _signed(value: Interval | None) -> Shown:
    if value is None:
        return Shown("")
    mean, low, high = (f"{x:+z.3f}" for x in (value.mean, value.low, value.high))  # z: no -0.000
    return Shown(mean, "" if low == high else f"{low} – {high}")


def _told(value: Any) -> str:
    """A mapping as a line: name value, name value …"""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_told(v)}" for k, v in sorted(value.items()) if v not in (None, ""))
    if isinstance(value, list | tuple):
        return " ".join(map(_told, value))
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)
