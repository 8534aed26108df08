"""Training on a GPU: bit for bit where asked, compiled and plain alike, every encoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longitude.training.checkpoint import Folder
from longitude.training.distributed import World
from longitude.training.lab.text import windows
from longitude.training.lab.trainable import every
from longitude.training.loop import Manner, train
from tests.training.lab.conftest import small

pytestmark = pytest.mark.accelerator


@pytest.fixture
def gpu() -> World:
    return World(torch.device("cuda", 0))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("scheme", ["rope()", "learned(64)", "alibi()"])
def test_deterministic_runs_go_on_bit_for_bit(corpus, tmp_path, gpu, scheme, compiled):
    run = small(corpus, scheme, steps=8, dtype="bfloat16")
    shape = replace(run.shape, length=64, dim=64, hidden=128)
    run = replace(run, shape=shape)
    manner = Manner(compiled, deterministic=True, every=1e9)

    class Enough(Exception):
        pass

    def save_and_go(step, *rest):
        Folder.save(folder, step, *rest)
        raise Enough

    straight, losses, _ = train(run, windows(corpus, 64), Folder(tmp_path / "a"), gpu, manner)
    folder = Folder(tmp_path / "b")
    object.__setattr__(folder, "save", save_and_go)
    with pytest.raises(Enough):
        train(run, windows(corpus, 64), folder, gpu, replace(manner, every=0.0))
    gone_on, more, _ = train(run, windows(corpus, 64), Folder(tmp_path / "b"), gpu, manner)
    assert torch.equal(losses, more)
    for p, q in zip(straight.parameters(), gone_on.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("scheme", every(64, 2))
def test_every_encoding_trains_on_a_gpu_as_on_a_cpu(corpus, tmp_path, gpu, scheme):
    run = small(corpus, scheme, steps=3, rate=1e-3)  # at 1e-2 FIRE makes 5e-2 out of TF32's 1e-4
    run = replace(run, shape=replace(run.shape, length=64, dim=64, hidden=128))
    found = [
        train(run, windows(corpus, 64), Folder(tmp_path / name), world, Manner(compiled))[1].cpu()
        for name, world, compiled in (
            ("cpu", World(torch.device("cpu")), False),
            ("plain", gpu, False),
            ("compiled", gpu, True),
        )
    ]
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found[0], found[2], rtol=2e-3, atol=2e-3)
