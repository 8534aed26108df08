"""A real checkpoint, SmolLM2-135M-Instruct (window 8,192), inside its window and beyond."""

from __future__ import annotations

from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pydoc_data.topics import topics

import pytest
import torch
from torch.nn import functional as F

import longitude.hf as lh
from longitude.core.text import parse
from longitude.hf.patch import attention_patched, probed_layers

LEAKY = "rope(base=100000, remap=leaky_rerope(4096, 8))"
FAR = 32_000


@pytest.fixture(scope="module")
def loaded(smollm2_file):
    with redirect_stderr(StringIO()) as said, torch.no_grad():
        yield *lh.load(str(smollm2_file), device="cpu"), said.getvalue()


@pytest.fixture(scope="module")
def smollm2(loaded):
    model, tokenizer, _ = loaded
    text = "\n".join(topics[name] for name in sorted(topics))[:400_000]
    return model, torch.tensor([tokenizer(text, verbose=False).input_ids])


def test_it_loads_in_one_line(loaded):
    model, tokenizer, said = loaded
    assert said.count("\n") == 1
    assert len(tokenizer) == model.config.vocab_size == 49152
    assert model.config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert model.config.max_position_embeddings == 8192 and model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


def losses(model, ids, pos=None):
    """The loss of every token but the first."""
    pos = torch.arange(ids.shape[1] - 1)[None] if pos is None else pos
    mask = torch.ones_like(pos)  # or transformers takes a gap for the end of a document
    said = model.base_model(ids[:, :-1], position_ids=pos, attention_mask=mask, use_cache=False)
    parts = zip(said[0][0].split(2048), ids[0, 1:].split(2048), strict=True)
    head = model.get_output_embeddings()
    return torch.cat([F.cross_entropy(head(h), y, reduction="none") for h, y in parts])


def test_its_scheme_is_known_and_gives_its_logits(smollm2):
    model, ids = smollm2
    assert lh.scheme_of(model) == parse("rope(base=100000)")
    stock, seen = model(ids[:, :60]).logits, probed_layers(model)
    with attention_patched(model, seen, [one.scheme for one in seen]):
        torch.testing.assert_close(model(ids[:, :60]).logits, stock, atol=2e-4, rtol=1e-5)


def test_half_a_text_far_away_is_read_by_leaky_rerope_alone(smollm2):
    """The second half stands 32,000 positions later: what a text four times the window asks for."""
    model, ids = smollm2
    pos = torch.cat([torch.arange(100), torch.arange(100, 200) + FAR])[None]
    near = losses(model, ids[:, :201])[100:].mean()
    lost = losses(model, ids[:, :201], pos)[100:].mean()
    with lh.patched(model, LEAKY, check=False):
        found = losses(model, ids[:, :201], pos)[100:].mean()
    assert lost > near + 2 and found < near + 1


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, LEAKY], ids=["untouched", "leaky"])
def test_four_times_the_window(smollm2, scheme):
    model, ids = smollm2
    inside = losses(model, ids[:, :8193])[-1024:].mean()
    with lh.patched(model, scheme) if scheme else nullcontext():
        beyond = losses(model, ids[:, :32769])[-1024:].mean()
    assert beyond > inside + 2 if scheme is None else beyond < inside + 0.5
