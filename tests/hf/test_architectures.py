"""Every architecture that goes through transformers' attention interface, without a line for any.

For each: its own logits are reproduced, cached decoding equals prefill under a remap, and leaving a
patch restores the model to the bit.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longitude.core.validate import UserError
from longitude.hf.patch import attention_patched, patched, probed_layers, scheme_of
from tests.hf.support import LEFT_ALONE, refused, row, rows, words
from tests.hf.tiny import DECODERS, REFUSED, decoder, ids, shared

LEAKY = "rope(remap=leaky_rerope(10, 4))"
NO_ROTATION = "window(10)"  # for models whose attention has no positions
STEPS = (0, 7, 20, 21, 22, 32)  # a cache filled in chunks and token by token
ONE_BY_ONE = ("jamba",)  # whose own state space takes one token after a prefill
FROM_ZERO = ("bamba",)  # count from 0 in every forward, unless positions are given
# one of each kind of attention: windows, no rotation, latent, chunks, linear, convolutions, sinks
GENERATING = ("llama", "gemma3_text", "smollm3", "deepseek_v3", "llama4_text", "qwen3_next", "lfm2")
GENERATING += ("gpt_oss", "jetmoe", "qwen3_5_text", "bamba")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def known(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")


@pytest.fixture(scope="module", params=DECODERS)
def model(request):
    known(request.param)
    return shared(request.param)


def greedy(model, prompt, **more):
    settings = {"max_new_tokens": 8, "do_sample": False, **more}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)


def by_steps(model, tokens, bounds=STEPS):
    """Logits of a text fed to a cache piece by piece."""
    past, logits = None, []
    for a, b in pairwise(bounds):
        counted = model.config.model_type not in FROM_ZERO
        given = {} if counted else {"position_ids": torch.arange(a, b)[None]}
        out = model(tokens[:, a:b], past_key_values=past, use_cache=True, **given)
        past = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, 1)


def test_its_own_scheme_gives_its_own_logits(model):
    text = ids(32, rows=2)
    stock, layers, own = model(text).logits, probed_layers(model), scheme_of(model)
    with attention_patched(model, layers, [layer.scheme for layer in layers]):
        torch.testing.assert_close(model(text).logits, stock, atol=1e-5, rtol=1e-5)
    with patched(model, own):
        assert torch.equal(model(text).logits, stock)
        assert scheme_of(model) == own
    assert torch.equal(model(text).logits, stock)


def test_decoding_equals_prefill_under_a_remap(model):
    text = ids(32, rows=2)
    stock = model(text).logits
    rotates = any(layer.scheme.rotary for layer in probed_layers(model))
    steps = (0, *range(20, 33)) if model.config.model_type in ONE_BY_ONE else STEPS
    with patched(model, LEAKY if rotates else NO_ROTATION, check=False):
        full = model(text, use_cache=False).logits
        torch.testing.assert_close(by_steps(model, text, steps), full, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(full, stock, atol=1e-4)
    assert torch.equal(model(text).logits, stock)


def test_the_table_of_the_docs_says_what_the_probe_finds(model):
    """The table reads configurations; here is what the models do."""
    kind = model.config.model_type
    layers, told = probed_layers(model), row(kind)
    assert {words(layer.scheme) for layer in layers} == set(told.attention)
    alone = set(told.left_alone) - {LEFT_ALONE["hybrid"]}
    assert bool(alone) == (len(layers) < model.config.num_hidden_layers)


def test_sixty_architectures_and_a_row_for_each():
    assert len(DECODERS) >= 60
    assert [each.model_type for each in rows()] == sorted(DECODERS)
    assert [kind for kind, _ in refused()] == sorted(REFUSED)


@pytest.mark.parametrize("kind", GENERATING)
def test_generating_with_left_padding_is_generating_without(kind):
    known(kind)
    model, text = shared(kind), ids(30, rows=2)
    stock = greedy(model, text[:, :20])
    layers = probed_layers(model)
    with attention_patched(model, layers, [layer.scheme for layer in layers]):
        assert torch.equal(greedy(model, text[:, :20]), stock)
    padded = torch.cat([torch.zeros(2, 6, dtype=torch.long), text[:, :20]], 1)
    padded[1] = text[1, :26]
    mask = torch.ones_like(padded)
    mask[0, :6] = 0
    with patched(model, LEAKY):
        both = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert torch.equal(both[:1, 26:], greedy(model, text[:1, :20])[:, 20:])
        assert torch.equal(both[1:, 26:], greedy(model, text[1:, :26])[:, 26:])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_off_the_interface_is_refused_by_name(kind):
    known(kind)
    model = decoder(kind)
    stock = model(ids(20)).logits
    with pytest.raises(UserError, match=REFUSED[kind].says):
        with patched(model, LEAKY):
            pass
    assert torch.equal(model(ids(20)).logits, stock)
