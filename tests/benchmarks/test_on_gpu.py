"""On a GPU: every suite at small sizes, with its memory, its goals and its graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.suites import run
from benchmarks.suites.rows import OURS, SUITES
from benchmarks.suites.setup import setup

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("suite", SUITES)
def test_all_of_ours_runs(suite: str) -> None:
    how = replace(setup("cuda", tokens=(512,)), compiles=suite != "extend")
    found = [row for rows in run.run(how, (suite,), 2) for row in rows]
    for row in found:
        assert row.refused is None and row.ms and row.speed and row.peak, row
        assert row.error is None or row.error < 1e-2, row
    if suite in ("rope", "decode"):
        assert any("in CUDA graphs" in row.work.name and row.kind == OURS for row in found)
    if suite != "extend":
        assert any(row.reached is not None for row in found)
