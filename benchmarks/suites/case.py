"""A benchmark case: a workload, its baseline and other methods to compute it, measured together.

A method that fails becomes a row with the reason and never ends the run: peers come in many
versions, and methods whose memory grows with n² run out of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.rows import BASELINE, OURS, Row, Work
from benchmarks.suites.timing import Run, compared, timed


@dataclass(frozen=True, eq=False)
class Way:
    """A method to compute a workload. `error` rates its output; `goal` holds what it should reach.

    `run` is None if the method is not available; `why` then gives the reason.
    """

    name: str
    run: Run | None
    kind: str = OURS
    error: Callable[[Any], float] | None = None
    goal: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, eq=False)
class Case:
    """A workload and its methods, the baseline first; a run's `amount` per second is in `unit`.

    `readings`, if given, replaces the interleaved runs: each method's seconds, one per round.
    """

    work: Work
    ways: Sequence[Way]
    inputs: Sequence[Tensor] = ()
    amount: float = 0.0
    unit: str = ""
    readings: Callable[[int], dict[str, list[float]]] | None = None


@dataclass
class Trial:
    """What the untimed runs of a method showed: error, peak memory, or the reason why it failed."""

    way: Way
    error: float | None = None
    peak: int | None = None
    refused: str | None = None


def measure(case: Case, rounds: int, cuda: bool) -> list[Row]:
    """Measure a case and return one row per method."""
    trials = [_trial(way, case.inputs, cuda) for way in case.ways]
    runs = {t.way.name: t.way.run for t in trials if t.refused is None and t.way.run is not None}
    first = trials[0]
    if case.readings is not None:
        times = compared(case.readings(rounds), first.way.name)
    else:
        times = timed(runs, first.way.name, rounds, cuda)
    return [
        _row(case, n, trial, first, times.get(trial.way.name)) for n, trial in enumerate(trials)
    ]


def _row(case: Case, order: int, trial: Trial, first: Trial, ran: Any) -> Row:
    way = trial.way
    kind = BASELINE if trial is first else way.kind
    common = {"order": order, "goal": dict(way.goal), "unit": case.unit, "refused": trial.refused}
    if ran is None:
        return Row(case.work, way.name, kind, **common)
    return Row(
        case.work,
        way.name,
        kind,
        **common,
        ms=ran.ms,
        speed=ran.speed,
        least=ran.least,
        most=ran.most,
        rate=case.amount / (ran.ms / 1e3) if case.amount else None,
        error=trial.error,
        error_ratio=_ratio(trial.error, first.error),
        peak=trial.peak,
        peak_ratio=_ratio(trial.peak, first.peak),
    )


def _ratio(own: float | None, other: float | None) -> float | None:
    return own / other if own is not None and other else None


def _trial(way: Way, inputs: Sequence[Tensor], cuda: bool) -> Trial:
    """Run a method once to judge its output and, on CUDA, once more to measure its peak memory."""
    trial = Trial(way, refused=way.why or None)
    if way.run is None:
        return trial
    try:
        output = way.run()
        trial.error = way.error(output) if way.error else None
        del output
        trial.peak = _peak(way.run, inputs) if cuda else None
    except Exception as e:  # any exception of a peer is reported in its row
        trial.refused = error_line(e)
    if cuda:
        _free_memory()
    return trial


def error_line(e: Exception) -> str:
    """Return an exception as one line of at most 160 characters."""
    line = next(iter(str(e).strip().splitlines()), "")
    return f"{type(e).__name__}: {line}"[:160].rstrip(": ")


def _peak(run: Run, inputs: Sequence[Tensor]) -> int:
    """Return the peak device memory of a run in bytes, including the inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = run()
    torch.cuda.synchronize()
    del output
    return sum(x.nbytes for x in inputs) + torch.cuda.max_memory_allocated() - before


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
