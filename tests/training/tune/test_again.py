"""Layers that run again under a patch give the gradients of those that run once."""

from __future__ import annotations

import pytest
import torch

from longitude.core.text import parse
from longitude.hf.patch import apply, undo
from longitude.training.tune.checkpointing import checkpointed
from longitude.training.tune.shifted_groups import grouped, shifted

ORDER = torch.arange(40)[None]
PACKED = torch.cat([torch.arange(25), torch.arange(15)])[None]
SKIPS = torch.cat([torch.arange(20), torch.arange(120, 140)])[None]


def gradients(model, pos):
    model.train().zero_grad()
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids) if pos is SKIPS else None
    given = {"position_ids": pos.expand(2, -1), "attention_mask": mask, "use_cache": False}
    model(ids, labels=ids, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("pos", [ORDER, PACKED, SKIPS], ids=["order", "packed", "skips"])
@pytest.mark.parametrize("text", ["rope(remap=leaky_rerope(8, 4))", "rope(frequencies=linear(2))"])
def test_gradients_are_those_of_one_run(llama, text, pos):
    apply(llama, text)
    once = gradients(llama, pos)
    checkpointed(llama)
    again = gradients(llama, pos)
    for name, wanted in once.items():
        torch.testing.assert_close(again[name], wanted)


def test_shifted_groups_run_again_as_well(llama):
    apply(llama, grouped(parse("rope()"), 8))
    with shifted(llama, 8):
        once = gradients(llama, PACKED)
        checkpointed(llama)
        again = gradients(llama, PACKED)
    undo(llama)
    assert not torch.allclose(gradients(llama, PACKED)["lm_head.weight"], once["lm_head.weight"])
    for name, wanted in once.items():
        torch.testing.assert_close(again[name], wanted)
