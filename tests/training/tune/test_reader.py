"""The loss that training sees is the model's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from longitude.hf.loading import load
from longitude.hf.patch import apply
from longitude.training.tune.loss_model import Reader

N = 24


def batch(vocabulary=61, seed=0):
    row = torch.randint(vocabulary, (2, N + 1), generator=torch.Generator().manual_seed(seed))
    return row[:, :-1], row[:, 1:], torch.rand(2, N, generator=torch.Generator().manual_seed(1))


def plain(logits, targets, weights):
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum()


@pytest.mark.parametrize("text", [None, "rope(remap=leaky_rerope(8, 4))"])
def test_it_is_the_cross_entropy_of_the_models_logits(llama, text):
    if text:
        apply(llama, text)
    tokens, targets, weights = batch()
    pos = torch.arange(N).expand(2, -1)
    reader = Reader(llama)
    assert reader.plain_head and reader.packs()
    found = reader(tokens, pos, targets, weights)
    torch.testing.assert_close(found, plain(llama(tokens).logits, targets, weights))


@pytest.mark.parametrize("text", [None, "rope(remap=leaky_rerope(8, 4))"])
def test_packed_documents_are_read_as_each_alone(llama, text):
    if text:
        apply(llama, text)
    tokens, targets, weights = batch()
    cut = 10
    pos = torch.cat([torch.arange(cut), torch.arange(N - cut)]).expand(2, -1)
    alone = [
        plain(llama(tokens[:, some]).logits, targets[:, some], weights[:, some])
        for some in (slice(cut), slice(cut, None))
    ]
    found = Reader(llama)(tokens, pos, targets, weights)
    torch.testing.assert_close(found, sum(alone))


@pytest.mark.parametrize("text", ["rope(frequencies=linear(2))", "rope(remap=leaky_rerope(8, 4))"])
def test_a_skip_of_drawn_positions_is_no_new_document(llama, text):
    """What the first chunk holds is seen by the second."""
    apply(llama, text)
    tokens, targets, weights = batch()
    weights[:, :-1] = 0  # the last token alone is scored
    pos = torch.cat([torch.arange(10), torch.arange(40, 40 + N - 10)]).expand(2, -1)
    reader = Reader(llama)
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 61
    a, b = (reader(t, pos, targets, weights, drawn=True).item() for t in (tokens, other))
    assert a != b
    full = llama(tokens, position_ids=pos, attention_mask=torch.ones_like(tokens)).logits
    assert a == pytest.approx(plain(full, targets, weights).item(), rel=1e-5)


@pytest.mark.parametrize(("name", "packs"), [("tiny-learned", True), ("tiny-alibi", False)])
def test_other_families_say_what_they_can(name, packs):
    model, _ = load(name, device="cpu", quiet=True)
    reader = Reader(model)
    tokens, targets, weights = batch(256)
    assert reader.packs() is packs
    found = reader(tokens, torch.arange(N).expand(2, -1), targets, weights)
    torch.testing.assert_close(found, plain(model(tokens).logits, targets, weights))


def test_a_head_that_does_more_than_multiply_is_asked_itself():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=1.0,
        initializer_range=0.5,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    tokens, targets, weights = batch()
    reader = Reader(model)
    assert not reader.plain_head
    found = reader(tokens, torch.arange(N).expand(2, -1), targets, weights)
    torch.testing.assert_close(found, plain(model(tokens).logits, targets, weights))
