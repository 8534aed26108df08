"""What is left open is chosen so that nothing is lost."""

import pytest
import torch

from longitude.hf import device as choose
from longitude.hf.device import device_of, dtype_of, has_bfloat16

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF, FULL, BRAIN = torch.float16, torch.float32, torch.bfloat16


@pytest.mark.parametrize("able", [True, False])
def test_a_cpu_takes_float32_unless_bfloat16_is_the_files_and_its_own(monkeypatch, able) -> None:
    monkeypatch.setattr(choose, "has_bfloat16", lambda: able)
    assert dtype_of("auto", BRAIN, CPU)[0] == (BRAIN if able else FULL)
    with monkeypatch.context() as over_ranks:
        over_ranks.setattr(torch.distributed, "is_initialized", lambda: True)
        assert dtype_of("auto", BRAIN, CPU)[0] == FULL
    for own in (HALF, FULL, None):
        assert dtype_of("auto", own, CPU)[0] == FULL


def test_cuda_takes_the_files_own(monkeypatch) -> None:
    assert [dtype_of("auto", own, CUDA)[0] for own in (HALF, FULL, BRAIN)] == [HALF, FULL, BRAIN]
    assert dtype_of("auto", None, CUDA)[0] == BRAIN
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of("auto") == CUDA


@pytest.mark.parametrize(
    ("flags", "able"),
    [
        ("avx512f avx512_bf16", True),
        ("fp asimd bf16", True),
        ("avx2 avx512f", False),
        (None, False),
    ],
)
def test_a_cpus_instructions_are_read_not_timed(monkeypatch, tmp_path, flags, able) -> None:
    file = tmp_path / "cpuinfo"
    if flags is not None:  # else a system that lists none
        file.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(choose, "Path", lambda name: file)
    has_bfloat16.cache_clear()
    assert has_bfloat16() is able
    has_bfloat16.cache_clear()
