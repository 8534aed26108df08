"""What is left open is chosen so that nothing is lost."""

import pytest
import torch

from longitude.hf import device as choose
from longitude.hf.device import bfloat16_is_faster, device_of, dtype_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize("faster", [True, False])
def test_a_cpu_takes_float32_unless_bfloat16_is_the_files_and_faster(monkeypatch, faster) -> None:
    monkeypatch.setattr(choose, "bfloat16_is_faster", lambda: faster)
    assert dtype_of("auto", BRAIN, CPU)[0] == (BRAIN if faster else FULL)
    with monkeypatch.context() as over_ranks:  # each of which would time it for itself
        over_ranks.setattr(torch.distributed, "is_initialized", lambda: True)
        assert dtype_of("auto", BRAIN, CPU)[0] == FULL
    for own in (HALF, FULL, None):
        assert dtype_of("auto", own, CPU)[0] == FULL


def test_cuda_takes_the_files_own(monkeypatch) -> None:
    assert [dtype_of("auto", own, CUDA)[0] for own in (HALF, FULL, BRAIN)] == [HALF, FULL, BRAIN]
    assert dtype_of("auto", None, CUDA)[0] == BRAIN
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of("auto") == CUDA


def test_the_cpu_is_timed_once(monkeypatch) -> None:
    timed = {BRAIN: 1.0, FULL: 1.1}  # a tie goes to float32
    bfloat16_is_faster.cache_clear()
    monkeypatch.setattr(choose, "seconds_in", timed.pop)
    assert not bfloat16_is_faster() and not bfloat16_is_faster() and not timed
    bfloat16_is_faster.cache_clear()
    monkeypatch.undo()
    assert bfloat16_is_faster() in (True, False)
