"""Time several ways to do one thing in turns, and print them as ratios.

Machines are shared and noisy, so the ways take turns within each round and each row is the median
of its ratios to the baseline of the same round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table


@dataclass
class Row:
    """One way: its time, its ratio to the baseline, and its error against float64."""

    name: str
    ms: float
    ratio: float
    error: float | None = None


def clock(run: Callable[[], object], cuda: bool) -> float:
    """Seconds of one run."""
    if not cuda:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def compare(
    ways: dict[str, Callable[[], object]],
    baseline: str,
    rounds: int,
    errors: dict[str, float],
    cuda: bool,
) -> list[Row]:
    """Every way, in turns, against the baseline."""
    for run in ways.values():  # compilation and first touches stay out of the numbers
        for _ in range(3):
            run()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            taken[name].append(clock(run, cuda))
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
    """A table for people on stdout, or JSON lines for programs."""
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
