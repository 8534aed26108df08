"""One way to do one piece of work, as it was timed: the numbers, or why there are none.

Standard library only, so that a table or a chart can be made of rows where no torch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longitude.core.store import Row as Recorded
from longitude.core.store import Store
from longitude.core.validate import UserError

KIND = "bench"
SUITES = ("rope", "attention", "decode", "paged", "model", "ranks")
BASELINE, OURS, PEER = "baseline", "longitude", "peer"
ONE_PASS, MERGED = 1.2, 1.4  # the error that is allowed, as a multiple of the baseline's own
ROOM = 1.3  # and the memory


@dataclass(frozen=True)
class Work:
    """What is done, on how much, on what machine: equal for every way of a case. The baseline is
    what it is compared with, told with the kernel that was fastest when it was measured."""

    suite: str
    name: str
    sizes: str
    tokens: int
    baseline: str
    machine: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """What decides the numbers: which kernel was fastest is one of them."""
        return {name: value for name, value in asdict(self).items() if name != "baseline"}


@dataclass(frozen=True)
class Row:
    """A way and its numbers.

    `speed` is the baseline's time over its own, the median over rounds: 1 is as fast, more is
    faster; `least` and `most` are its range. `rate` is in `unit` (B/s, FLOP/s). `error` is
    relative, against float64, and `error_ratio` a multiple of the baseline's; `peak` is in bytes,
    with the inputs. `goal` names the numbers to reach: a `speed` at least, `ms`, `error` and
    `memory` (as ratios) at most. `made` is when it was recorded.
    """

    work: Work
    way: str
    kind: str
    order: int = 0
    ms: float | None = None
    speed: float | None = None
    rate: float | None = None
    unit: str = ""
    error: float | None = None
    error_ratio: float | None = None
    peak: int | None = None
    peak_ratio: float | None = None
    goal: Mapping[str, float] = field(default_factory=dict)
    refused: str | None = None
    made: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether all is as it should be; None where nothing is asked, or known."""
        return None if not self.goal or self.ms is None else not self.missed()

    def missed(self) -> dict[str, str]:
        """What is not as it should be, and by how much; an error or a peak without a baseline's
        can't be told."""
        goal = self.goal
        bounds = (
            ("speed", self.speed or 0.0, goal.get("speed", 0.0), float("inf")),
            ("ms", self.ms or 0.0, 0.0, goal.get("ms", float("inf"))),
            ("error", self.error_ratio or 0.0, 0.0, goal.get("error", float("inf"))),
            ("memory", self.peak_ratio or 0.0, 0.0, goal.get("memory", float("inf"))),
        )
        wrong = [bound for bound in bounds if not bound[2] <= bound[1] <= bound[3]]
        return {
            name: f"{name} {value:.3g}, not "
            + (f"≥ {least:.3g}" if value < least else f"≤ {most:.3g}")
            for name, value, least, most in wrong
        }


def store_rows(store: Store, rows: Iterable[Row]) -> None:
    """Record rows; one that was timed before is replaced."""
    for row in rows:
        value = asdict(row) | {"baseline": row.work.baseline}
        del value["work"], value["way"], value["made"]
        named = BASELINE if row.kind == BASELINE else row.way
        store.put({"kind": KIND, **row.work.key, "way": named}, value)


def recorded(store: Store) -> list[Row]:
    """Every row that a store has, as it was measured: by machine and suite, case after case."""
    found = [_read(row) for row in store.rows(kind=KIND)]
    machines = sorted({tuple(sorted(r.work.machine.items())) for r in found})
    place = {m: n for n, m in enumerate(machines)}
    return sorted(
        found,
        key=lambda r: (
            place[tuple(sorted(r.work.machine.items()))],
            SUITES.index(r.work.suite) if r.work.suite in SUITES else len(SUITES),
            r.order,
        ),
    )


def load(store: Store, paths: Iterable[Path]) -> list[Row]:
    """The rows of exported files, taken into a store, with what it has already."""
    for path in paths:
        store.load(path)
    found = recorded(store)
    if not found:
        raise UserError(
            f"There are no rows of a benchmark in {', '.join(map(str, paths))}: "
            "make some with `longitude bench --out rows.jsonl`."
        )
    return found


def plain(row: Row) -> dict[str, Any]:
    """A row as one flat object of JSON's own types."""
    value = asdict(row)
    return {**value.pop("work"), **value, "reached": row.reached}


def cases(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of the same work together, in the order of their first."""
    same: dict[str, list[Row]] = {}
    for row in rows:
        same.setdefault(repr(row.work.key), []).append(row)
    return list(same.values())


def _read(row: Recorded) -> Row:
    key, value = dict(row.key), dict(row.value)
    key.pop("kind")
    way = key.pop("way")
    try:
        work = Work(**key, baseline=value.pop("baseline", ""))
        return Row(work, work.baseline if way == BASELINE else way, made=row.made, **value)
    except TypeError as e:
        raise UserError(
            f"a row of {way!r} is none of this version's ({e}): measure it anew."
        ) from None
