"""Training by accelerate through `lh.apply(model, scheme, group=…)` has one process's losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import run


def test_two_ranks_train_by_accelerate_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for found in run("tests.training.accelerate_ranks", tmp_path, 2):
        one, ranks = torch.tensor(found["one"]), torch.tensor(found["ranks"])
        torch.testing.assert_close(ranks, one, rtol=0, atol=1e-4)
        assert len(one) == 4 and float(one.diff().abs().min()) > 1e-3  # the weights do change
