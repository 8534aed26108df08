"""Rows: the measurements of one method on one workload, or the reason why there are none.

No torch is imported, so that rows can be shown as tables or charts where it is not installed.
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
ONE_PASS, MERGED = 1.2, 1.4  # the greatest error allowed, as a multiple of the baseline's
ROOM = 1.3  # the greatest memory allowed, likewise


@dataclass(frozen=True)
class Work:
    """A workload, its sizes and the machine: equal for all methods of a case. `baseline` is the
    baseline's name, with the kernel that was fastest when it was measured."""

    suite: str
    name: str
    sizes: str
    tokens: int
    baseline: str
    machine: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """The fields that identify a workload; the baseline's kernel is rather a result."""
        return {name: value for name, value in asdict(self).items() if name != "baseline"}


@dataclass(frozen=True)
class Row:
    """A method and its measurements.

    `speed` is the baseline's time divided by the method's, the median over rounds: 1 is as fast,
    more is faster; `least` and `most` are its range. `rate` is in `unit` (B/s, FLOP/s). `error` is
    relative, against float64, and `error_ratio` a multiple of the baseline's; `peak` is in bytes,
    with the inputs. `goal` holds the goals: `speed` is a minimum; `ms`, `error` and `memory` (these
    two as ratios) are maxima. `made` is the time of recording.
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
        """Whether every goal is reached; None if there is no goal or no timing."""
        return None if not self.goal or self.ms is None else not self.missed()

    def missed(self) -> dict[str, str]:
        """Return the goals that are missed, and by how much; error and memory can't be missed if
        the baseline has none."""
        goal = self.goal
        bounds = (
            ("speed", self.speed or 0.0, goal.get("speed", 0.0), float("inf")),
            ("ms", self.ms or 0.0, 0.0, goal.get("ms", float("inf"))),
            ("error", self.error_ratio or 0.0, 0.0, goal.get("error", float("inf"))),
            ("memory", self.peak_ratio or 0.0, 0.0, goal.get("memory", float("inf"))),
        )
        violated = [bound for bound in bounds if not bound[2] <= bound[1] <= bound[3]]
        return {
            name: f"{name} {value:.3g}, not "
            + (f"≥ {least:.3g}" if value < least else f"≤ {most:.3g}")
            for name, value, least, most in violated
        }


def store_rows(store: Store, rows: Iterable[Row]) -> None:
    """Record rows, replacing older ones of the same method and workload."""
    for row in rows:
        value = asdict(row) | {"baseline": row.work.baseline}
        del value["work"], value["way"], value["made"]
        way = BASELINE if row.kind == BASELINE else row.way
        store.put({"kind": KIND, **row.work.key, "way": way}, value)


def recorded(store: Store) -> list[Row]:
    """Return all rows of a store by machine and suite, in the order of measurement."""
    rows = [_read(row) for row in store.rows(kind=KIND)]
    machines = sorted({tuple(sorted(r.work.machine.items())) for r in rows})
    rank = {m: n for n, m in enumerate(machines)}
    return sorted(
        rows,
        key=lambda r: (
            rank[tuple(sorted(r.work.machine.items()))],
            SUITES.index(r.work.suite) if r.work.suite in SUITES else len(SUITES),
            r.order,
        ),
    )


def load(store: Store, paths: Iterable[Path]) -> list[Row]:
    """Load exported files into a store; return all rows that it then holds."""
    for path in paths:
        store.load(path)
    rows = recorded(store)
    if not rows:
        raise UserError(
            f"No benchmark rows in {', '.join(map(str, paths))}: "
            "record some with `longitude bench --out rows.jsonl`."
        )
    return rows


def plain(row: Row) -> dict[str, Any]:
    """Return a row as one flat JSON object."""
    value = asdict(row)
    return {**value.pop("work"), **value, "reached": row.reached}


def cases(rows: Iterable[Row]) -> list[list[Row]]:
    """Group rows by workload, in the order of each group's first row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(row.work.key), []).append(row)
    return list(groups.values())


def _read(row: Recorded) -> Row:
    key, value = dict(row.key), dict(row.value)
    key.pop("kind")
    way = key.pop("way")
    try:
        work = Work(**key, baseline=value.pop("baseline", ""))
        return Row(work, work.baseline if way == BASELINE else way, made=row.made, **value)
    except TypeError as e:
        raise UserError(
            f"a row of {way!r} was recorded by another version ({e}): measure it again."
        ) from None
