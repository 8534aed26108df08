"""Several methods timed interleaved as `longitude bench` does, printed as ratios."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.suites.timing import FILL, readings


@dataclass
class Row:
    """One method: its time, its ratio to the baseline, and its error against float64."""

    name: str
    ms: float
    ratio: float
    error: float | None = None


def compare(
    ways: Mapping[str, Callable[[], object]],
    baseline: str,
    rounds: int,
    errors: dict[str, float],
    cuda: bool,
) -> list[Row]:
    """Time methods interleaved; compare each with the baseline."""
    taken = readings(ways, rounds, cuda, FILL if cuda else 0.0)
    return [
        Row(
            name,
            1e3 * median(times),
            median(t / b for t, b in zip(times, taken[baseline], strict=True)),
            errors.get(name),
        )
        for name, times in taken.items()
    ]


def show(title: str, rows: list[Row], baseline: str, as_json: bool) -> None:
    """Print a table for people, or JSON lines for programs, to stdout."""
    if as_json:
        for row in rows:
            json.dump({"benchmark": title, "baseline": baseline, **asdict(row)}, sys.stdout)
            print()
        return
    table = Table("way", "ms", f"× {baseline}", "error against float64", title=title)
    for row in rows:
        error = "" if row.error is None else f"{row.error:.1e}"
        table.add_row(row.name, f"{row.ms:.2f}", f"{row.ratio:.2f}", error)
    Console(width=100).print(table)
