"""Every architecture that goes through transformers' attention interface, by no line of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longitude.core.validate import UserError
from longitude.hf.patch import attention_patched, patched, probed_layers, scheme_of
from tests.hf.tiny import DECODERS, REFUSED, decoder, ids

LEAKY = "rope(remap=leaky_rerope(10, 4))"
STEPS = (0, 7, 20, 21, 22, 40)  # a cache filled in chunks and token by token


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def known(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")


# one of each kind of attention; the others are much like these, and run on demand
ALWAYS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma"),
    *("gemma2", "gemma3_text", "olmo2", "granite", "stablelm", "smollm3", "phi", "phi3"),
    *("gpt_neox", "cohere", "cohere2", "gpt_oss", "glm4", "exaone4", "diffllama", "jetmoe"),
    *("deepseek_v3", "llama4_text", "lfm2"),
)
KINDS = [pytest.param(k, marks=[] if k in ALWAYS else pytest.mark.slow) for k in DECODERS]


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    known(request.param)
    model = decoder(request.param)
    model.generation_config.eos_token_id = None
    return model


def greedy(model, prompt, **more):
    settings = {"max_new_tokens": 8, "do_sample": False, **more}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)


def by_steps(model, tokens, bounds=STEPS):
    """Logits of a text fed to a cache piece by piece."""
    past, said = None, []
    for a, b in pairwise(bounds):
        out = model(tokens[:, a:b], past_key_values=past, use_cache=True)
        past = out.past_key_values
        said.append(out.logits)
    return torch.cat(said, 1)


def test_its_own_scheme_gives_its_own_logits_and_tokens(model):
    text = ids(40, rows=2)
    stock, said = model(text).logits, greedy(model, text[:, :20])
    seen = probed_layers(model)
    with attention_patched(model, seen, [one.scheme for one in seen]):
        torch.testing.assert_close(model(text).logits, stock, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(text, use_cache=False).logits, stock, atol=1e-5, rtol=1e-5)
        assert torch.equal(greedy(model, text[:, :20]), said)
    assert torch.equal(model(text).logits, stock)


def test_a_text_of_its_own_scheme_changes_no_bit(model):
    text = ids(40)
    stock, own = model(text).logits, scheme_of(model)
    with patched(model, own):
        assert torch.equal(model(text).logits, stock)
        assert scheme_of(model) == own


def test_decoding_equals_prefill_under_another_scheme(model):
    text = ids(40, rows=2)
    stock = model(text).logits
    with patched(model, LEAKY):
        full = model(text).logits
        torch.testing.assert_close(by_steps(model, text), full, atol=2e-5, rtol=1e-5)
        alone = model(text[1:]).logits
        torch.testing.assert_close(alone, full[1:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(full, stock, atol=1e-4)
    assert torch.equal(model(text).logits, stock)


def test_left_padding_changes_nothing(model):
    text = ids(30, rows=2)
    padded = torch.cat([torch.zeros(2, 6, dtype=torch.long), text[:, :20]], 1)
    padded[1] = text[1, :26]
    mask = torch.ones_like(padded)
    mask[0, :6] = 0
    with patched(model, LEAKY):
        said = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert torch.equal(said[:1, 26:], greedy(model, text[:1, :20])[:, 20:])
        assert torch.equal(said[1:, 26:], greedy(model, text[1:, :26])[:, 26:])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_off_the_interface_is_refused_by_name(kind):
    known(kind)
    model = decoder(kind)
    stock = model(ids(20)).logits
    with pytest.raises(
        UserError, match=r"can't be patched|can't patch|only schemes of other frequencies"
    ):
        with patched(model, LEAKY):
            pass
    assert torch.equal(model(ids(20)).logits, stock)
