"""Gradients of a training step through merged passes are those of attention written out."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from longitude.hf import layer as seat
from longitude.hf.patch import apply
from longitude.ops.attention import attention
from longitude.training.tune.loss_model import Reader


def gradients(reader: Reader) -> tuple[float, dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(61, (2, 60), generator=rng) for _ in range(2))
    pos = torch.cat([torch.arange(45), torch.arange(15)]).expand(2, -1)  # two documents
    weights = torch.rand(2, 60, generator=rng, dtype=torch.float64)
    reader.zero_grad()
    loss = reader(tokens, pos, targets, weights)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in reader.named_parameters()}


@pytest.mark.parametrize(
    "text",
    [
        "rope(remap=leaky_rerope(16, 4))",
        "rope(remap=rerope(16))",
        "rope(remap=self_extend(4, 16))",
        "rope(remap=dual_chunk(24, 8))",
        "rope(frequencies=yarn(4, original=16)) + window(12) + logn(16)",
    ],
)
def test_merged_passes_have_the_gradients_of_eager(llama, text, monkeypatch):
    apply(llama.double(), text)
    reader = Reader(llama)
    loss, made = gradients(reader)
    monkeypatch.setattr(seat, "attention", partial(attention, backend="eager"))
    wanted_loss, wanted = gradients(reader)
    assert loss == pytest.approx(wanted_loss, rel=1e-9)
    for name, want in wanted.items():
        torch.testing.assert_close(made[name], want, rtol=1e-7, atol=1e-9)
