"""Time several ways to do one thing interleaved: medians over rounds, and ratios within a round.

Machines are shared and noisy, so methods are interleaved within each round, and a ratio is the
median of the ratios within rounds, not the ratio of medians. On a CPU the time of the process
itself is read, over all its threads: what others do on the machine counts little in it. On CUDA the
device's events are read;
what is short is run as often as fills some milliseconds, so that launches run ahead of the device
as they do in a model, and the wait for the first is not all that is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch

WARM, WARM_CUDA = 1, 3  # runs before the clock: first touches stay out of the numbers
SETTLED = 0.6  # seconds of them on CUDA: cuDNN plans a new shape for 70 ms
FILL = 2e-2  # seconds that one reading lasts at least on CUDA
MOST = 64  # runs of one reading

Run = Callable[[], object]


class Ran(NamedTuple):
    """Milliseconds a run, and how many times as fast as the baseline: the median, the least and the
    most over rounds."""

    ms: float
    speed: float | None = None
    least: float | None = None
    most: float | None = None


def timed(ways: Mapping[str, Run], baseline: str, rounds: int, cuda: bool) -> dict[str, Ran]:
    """Every way, interleaved; speeds against the baseline, where it is among them."""
    return compared(readings(ways, rounds, cuda, FILL if cuda else 0.0), baseline)


def compared(taken: Mapping[str, list[float]], baseline: str) -> dict[str, Ran]:
    """Readings of seconds, one a round, against the baseline's."""
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
    """Seconds a run of each way, one number a round."""
    counts = {name: _count(run, cuda, fill) for name, run in ways.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            taken[name].append(seconds(run, cuda, counts[name]))
    return taken


def seconds(run: Run, cuda: bool, count: int = 1) -> float:
    """Seconds of one run, over `count` of them."""
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
    """Warm a way up; how many runs fill a reading."""
    once, spent, runs = 0.0, 0.0, 0
    while runs < (WARM_CUDA if cuda else WARM) or (cuda and spent < min(SETTLED, 30 * fill)):
        once = seconds(run, cuda)
        spent, runs = spent + once, runs + 1
    return min(MOST, max(1, round(fill / max(once, 1e-9))))


def graphed(run: Run) -> Run:
    """The same work captured in a CUDA graph: what is left when nothing is launched by Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made at the first run must not be made while capturing
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
