"""bfloat16 beside float32, as on an accelerator: what is multiplied in it, and what learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longitude.hf.patch import apply
from longitude.training.distributed import World
from longitude.training.tune.loss_model import Reader
from longitude.training.tune.options import Asked
from longitude.training.tune.params import Trained
from longitude.training.tune.prepare import prepare, ready
from longitude.training.tune.recipes import FULL, LORA
from longitude.training.tune.train import optimizer_for, take_step

WORLD = World(torch.device("cpu"))
SCHEMES = ["rope(remap=leaky_rerope(4, 8))", "rope(frequencies=yarn(2, original=256))"]


# some CPUs have no bfloat16 product, and say so, which takes its time
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@pytest.mark.parametrize("scheme", SCHEMES, ids=["ours", "stock"])
def test_the_loss_in_bfloat16_is_near_the_one_in_float32(llama, scheme):
    apply(llama, scheme)
    reader, ids, pos = Reader(llama), torch.arange(12)[None], torch.arange(12)[None]
    losses = []
    for mixed in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = reader(ids, pos, ids + 1, torch.ones(1, 12))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES, ids=["ours", "stock"])
@pytest.mark.parametrize("trained", [FULL, LORA])
def test_a_step_in_bfloat16_is_near_the_one_in_float32(folder, scheme, trained):
    if trained == LORA:
        pytest.importorskip("peft")
    asked = Asked(
        to="2x", scheme=scheme, text=(str(folder),), steps=1, rows=1, length=8, quiet=True,
        device="cpu", trained=trained, recipe="yarn",
    )  # fmt: skip
    losses = []
    for dtype in ("float32", "bfloat16"):
        job, _ = ready(prepare(replace(asked, dtype=dtype), WORLD))
        learns = Trained(job.reader.model)
        assert {p.dtype for _, p in learns.named_parameters()} == {torch.float32}
        optimizer = optimizer_for(learns, job.recipe)
        losses.append(take_step(job, learns, optimizer, 0, WORLD).item())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.05)
