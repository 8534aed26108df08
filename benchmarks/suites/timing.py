"""Interleaved timing of several methods: medians over rounds, and ratios within a round.

Machines are shared and noisy, so methods are interleaved within each round, and a ratio is the
median of the ratios within rounds, not the ratio of medians. On a CPU the CPU time of this process
is read, over all its threads: other processes affect it little. On CUDA the device's events are
read; a short method is repeated until it fills some milliseconds, so that launches run ahead of the
device as they do in a model, and the latency of the first launch does not dominate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch

WARM, WARM_CUDA = 1, 3  # untimed runs, so that one-time costs stay out of the numbers
SETTLED = 0.6  # seconds of untimed runs on CUDA: cuDNN takes 70 ms to plan a new shape
FILL = 2e-2  # seconds that one reading should last on CUDA
MOST = 64  # upper bound on the runs of one reading

Run = Callable[[], object]


class Ran(NamedTuple):
    """Milliseconds per run, and the speed relative to the baseline: its median, minimum and maximum
    over rounds."""

    ms: float
    speed: float | None = None
    least: float | None = None
    most: float | None = None


def timed(ways: Mapping[str, Run], baseline: str, rounds: int, cuda: bool) -> dict[str, Ran]:
    """Time methods interleaved; speeds are relative to the baseline if it is among them."""
    return compared(readings(ways, rounds, cuda, FILL if cuda else 0.0), baseline)


def compared(taken: Mapping[str, list[float]], baseline: str) -> dict[str, Ran]:
    """Compare each method's seconds, one reading per round, with the baseline's."""
    base = taken.get(baseline)
    return {name: _ran(times, base) for name, times in taken.items()}


def _ran(times: list[float], base: list[float] | None) -> Ran:
    if not base:
        return Ran(1e3 * median(times))
    speeds = [b / t for t, b in zip(times, base, strict=True)]
    return Ran(1e3 * median(times), median(speeds), min(speeds), max(speeds))


def readings(
    ways: Mapping[str, Run], rounds: int, cuda: bool, fill: float = 0.0
) -> dict[str, list[float]]:
    """Return each method's seconds per run, one reading per round."""
    counts = {name: _count(run, cuda, fill) for name, run in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            taken[name].append(seconds(run, cuda, counts[name]))
    return taken


def seconds(run: Run, cuda: bool, count: int = 1) -> float:
    """Return the seconds per run, averaged over `count` runs."""
    if not cuda:
        begin = time.process_time()
        for _ in range(count):
            run()
        return (time.process_time() - begin) / count
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / count


def _count(run: Run, cuda: bool, fill: float) -> int:
    """Warm up a method; return the number of runs that fill a reading."""
    once, spent, runs = 0.0, 0.0, 0
    while runs < (WARM_CUDA if cuda else WARM) or (cuda and spent < min(SETTLED, 30 * fill)):
        once = seconds(run, cuda)
        spent, runs = spent + once, runs + 1
    return min(MOST, max(1, round(fill / max(once, 1e-9))))


def graphed(run: Run) -> Run:
    """Capture a run in a CUDA graph, so that its time is without launches from Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what the first run creates must not be created while capturing
        for _ in range(WARM_CUDA):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> object:
        graph.replay()
        return out

    return replay
