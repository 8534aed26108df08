"""Training on a GPU: bit for bit where asked, compiled and plain alike, every encoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longitude.training.distributed import World
from longitude.training.lab.model import trainable_schemes
from longitude.training.lab.run import lab_folder, make_job
from longitude.training.loop import LoopOptions, train
from tests.training.conftest import CPU, small

pytestmark = pytest.mark.accelerator
OPTIONS = LoopOptions()


@pytest.fixture
def gpu() -> World:
    return World(torch.device("cuda", 0))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("scheme", ["rope()", "learned(64)", "alibi()"])
def test_deterministic_runs_go_on_bit_for_bit(corpus, tmp_path, gpu, scheme, compiled):
    run = small(corpus, scheme, steps=8, dtype="bfloat16")
    run = replace(run, config=replace(run.config, length=64, dim=64, hidden=128))

    class Enough(Exception):
        pass

    def stop_at_five(step) -> None:
        if step.step == 5:
            raise Enough

    def trained(name: str, report=lambda step: None):
        job = make_job(run, corpus, gpu, compiled)
        options = LoopOptions(deterministic=True, save_steps=4, report=report)
        losses, _ = train(job, lab_folder(tmp_path / name), gpu, options)
        return job.model, losses

    straight, losses = trained("a")
    with pytest.raises(Enough):
        trained("b", stop_at_five)
    resumed, more = trained("b")
    assert torch.equal(losses, more)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("scheme", trainable_schemes(64, 2))
def test_every_encoding_trains_on_a_gpu_as_on_a_cpu(corpus, tmp_path, gpu, scheme):
    run = small(corpus, scheme, steps=3, rate=1e-3)  # at 1e-2 FIRE makes 5e-2 out of TF32's 1e-4
    run = replace(run, config=replace(run.config, length=64, dim=64, hidden=128))
    cpu, *others = (
        train(make_job(run, corpus, world, compiled), lab_folder(tmp_path / name), world, OPTIONS)
        for name, world, compiled in (
            ("cpu", CPU, False),
            ("plain", gpu, False),
            ("compiled", gpu, True),
        )
    )
    for losses, _ in others:
        torch.testing.assert_close(losses.cpu(), cpu[0], rtol=2e-3, atol=2e-3)
