"""Suites run one case after another, as far as the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from benchmarks.suites import attention as attending
from benchmarks.suites import decode as decoding
from benchmarks.suites import model as extending
from benchmarks.suites import rope as turning
from benchmarks.suites.case import Case, measure, said
from benchmarks.suites.rows import SUITES, Row
from benchmarks.suites.setup import Setup
from longitude.core.validate import UserError

CASES: dict[str, Callable[[Setup], Iterator[Case]]] = {
    "rope": turning.cases,
    "attention": attending.cases,
    "decode": decoding.cases,
    "model": extending.cases,
}
RECOMPILES = 1024
News = Callable[[str], None]


def chosen(suite: str) -> tuple[str, ...]:
    """The suites that a name stands for."""
    if suite not in (*SUITES, "all"):
        raise UserError(f"no suite is called {suite!r}: use {', '.join(SUITES)} or all.")
    return SUITES if suite == "all" else (suite,)


@torch.no_grad()
def run(
    setup: Setup,
    suites: Sequence[str],
    rounds: int,
    seconds: float = float("inf"),
    tell: News = lambda _: None,
) -> Iterator[list[Row]]:
    """The rows of each case as it is measured. When the time is over, the cases that are left are
    told, and not measured."""
    end, order = time.monotonic() + seconds, 0
    with _patient(setup):
        for case in (case for suite in suites for case in CASES[suite](setup)):
            late = time.monotonic() > end
            tell(f"{case.work.name}: {case.work.sizes}" + (", left out: time is over" * late))
            if late:
                continue
            rows = _measured(case, rounds, setup.cuda)
            yield [replace(row, order=order + n) for n, row in enumerate(rows)]
            order += len(rows)


def _patient(setup: Setup) -> AbstractContextManager[Any]:
    """Each length is a compilation of its own; past dynamo's limit of 8 a baseline would run
    uncompiled, and flatter us."""
    if not (setup.cuda or setup.peers) or not setup.compiles:
        return nullcontext()
    import torch._dynamo.config as config

    return config.patch({"recompile_limit": RECOMPILES, "accumulated_recompile_limit": RECOMPILES})


def _measured(case: Case, rounds: int, cuda: bool) -> list[Row]:
    """A case's rows; one that breaks off is a row with its reason for each way."""
    try:
        return measure(case, rounds, cuda)
    except Exception as e:  # out of memory with every way at hand, say
        return [Row(case.work, way.name, way.kind, refused=said(e)) for way in case.ways]
