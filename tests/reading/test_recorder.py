"""The watch on attention against the weights that eager attention gives out itself."""

from __future__ import annotations

import copy

import pytest
import torch

from longitude.reading.windows import AttentionRecorder
from tests.reading.tiny import model

KINDS = ["llama", "qwen3", "gpt_neox", "gpt2", "bloom", "mpt", "gpt_oss", "mixtral"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_last_querys_weights_are_seen(kind: str) -> None:
    ids = torch.arange(30, 41)[None]
    eager = copy.deepcopy(model(kind, "eager")).float()  # experts know no float64
    weights = torch.stack(eager(ids, output_attentions=True).attentions).mean((0, 1, 2))[-1]
    watched = (
        [eager] if kind == "gpt_oss" else [eager, copy.deepcopy(model(kind)).float()]
    )  # gpt-oss has no other
    for m in watched:
        with AttentionRecorder(11) as recorder:
            out = m(ids)
        shares = recorder.shares()
        assert shares is not None and recorder.layers == m.config.num_hidden_layers
        torch.testing.assert_close(shares, weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.logits, m(ids).logits, rtol=0, atol=0)


def test_where_no_attention_is_seen_nothing_is_told() -> None:
    with AttentionRecorder(3) as recorder:
        torch.ones(2, 3).softmax(-1)
    assert recorder.shares() is None
