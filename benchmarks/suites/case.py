"""One case: a piece of work, its baseline, and the ways to do it, measured beside each other.

A way that fails is a row with its reason, never the end of the run: peers come in many versions,
and what needs memory that grows with n² runs out of it.
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
    """A way to do a case's work. `error` judges what it gave; `goal` is what it should reach.

    `run` is None where it can't be had, and `why` then says so.
    """

    name: str
    run: Run | None
    kind: str = OURS
    error: Callable[[Any], float] | None = None
    goal: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True, eq=False)
class Case:
    """Work, and ways to do it; the first is the baseline. `amount` of it, in `unit` a second.

    `readings` of its own gives seconds by way, one a round, where ways are not run in turns.
    """

    work: Work
    ways: Sequence[Way]
    inputs: Sequence[Tensor] = ()
    amount: float = 0.0
    unit: str = ""
    readings: Callable[[int], dict[str, list[float]]] | None = None


@dataclass
class Trial:
    """What one run of a way showed before the clock was started."""

    way: Way
    error: float | None = None
    peak: int | None = None
    refused: str | None = None


def measure(case: Case, rounds: int, cuda: bool) -> list[Row]:
    """A row for each way of a case."""
    trials = [_trial(way, case.inputs, cuda) for way in case.ways]
    able = {t.way.name: t.way.run for t in trials if t.refused is None and t.way.run is not None}
    first = trials[0]
    if case.readings is not None:
        times = compared(case.readings(rounds), first.way.name)
    else:
        times = timed(able, first.way.name, rounds, cuda)
    return [
        _row(case, n, trial, first, times.get(trial.way.name)) for n, trial in enumerate(trials)
    ]


def _row(case: Case, order: int, trial: Trial, first: Trial, ran: Any) -> Row:
    way = trial.way
    kind = BASELINE if trial is first else way.kind
    told = {"order": order, "goal": dict(way.goal), "unit": case.unit, "refused": trial.refused}
    if ran is None:
        return Row(case.work, way.name, kind, **told)
    return Row(
        case.work,
        way.name,
        kind,
        **told,
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
    """Run a way once for what it gives, and once more for what memory it takes."""
    trial = Trial(way, refused=way.why or None)
    if way.run is None:
        return trial
    try:
        made = way.run()
        trial.error = way.error(made) if way.error else None
        del made
        trial.peak = _peak(way.run, inputs) if cuda else None
    except Exception as e:  # whatever a peer raises is its row's reason
        trial.refused = error_line(e)
    if cuda:
        _free_memory()
    return trial


def error_line(e: Exception) -> str:
    """An error as one line of at most 160 characters."""
    line = next(iter(str(e).strip().splitlines()), "")
    return f"{type(e).__name__}: {line}"[:160].rstrip(": ")


def _peak(run: Run, inputs: Sequence[Tensor]) -> int:
    """The inputs and all that stood beside them at once, on the device."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = run()
    torch.cuda.synchronize()
    del made
    return sum(x.nbytes for x in inputs) + torch.cuda.max_memory_allocated() - before


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
