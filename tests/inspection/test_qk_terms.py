"""The four terms, against a layer that is written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from longitude.hf.loading import load
from longitude.inspection.qk_hooks import TERMS, qk_terms, split_by_position

from ..hf.families.models import tiny, tokens
from ..hf.tiny import decoder, ids


def norm(x: Tensor, sigma: Tensor, weight: Tensor) -> Tensor:
    """What a LayerNorm's gain makes of a part of its input, given the σ of the whole."""
    return (x - x.mean(-1, keepdim=True)) / sigma * weight


def by_hand(text: Tensor) -> dict[str, Tensor]:
    """The terms (h i j) of GPT-2's first layer."""
    loaded: Any = load("tiny-learned", dtype="float64", quiet=True)[0]
    model = loaded.transformer
    first, heads = model.h[0], model.config.n_head
    x, p = model.wte.weight[text], model.wpe.weight[: len(text)]
    ln, fused = first.ln_1, first.attn.c_attn
    sigma = ((x + p).var(-1, correction=0, keepdim=True) + ln.eps).sqrt()
    content = (norm(x, sigma, ln.weight) + ln.bias) @ fused.weight + fused.bias
    place = norm(p, sigma, ln.weight) @ fused.weight
    width = model.config.n_embd

    def split(made: Tensor, which: int) -> Tensor:
        return (
            made[:, which * width : (which + 1) * width].unflatten(1, (heads, -1)).transpose(0, 1)
        )

    scale = (width / heads) ** -0.5
    made = {}
    for name, q, k in zip(
        TERMS, (content, content, place, place), (content, place, content, place), strict=True
    ):
        made[name] = (split(q, 0) @ split(k, 1).mT * scale).detach()
    return made


def test_gpt2s_terms_are_those_of_its_weights() -> None:
    model, tokenizer = load("tiny-learned", dtype="float64", quiet=True)
    assert tokenizer is not None
    text = torch.tensor(tokenizer("def parse(text): return ast.literal_eval(text)").input_ids)
    rows = torch.arange(3, len(text), 4)
    found = qk_terms(model, text, rows)
    assert found is not None and found.layer == 0
    seen = torch.arange(len(text)) <= rows[:, None]
    assert found.pairs == int(seen.sum())
    expected = by_hand(text)
    total = sum(expected.values())
    assert isinstance(total, Tensor)
    for head in found.heads:
        for term in (*head.terms, head.whole):
            each = (total if term.name == "score" else expected[term.name])[head.head, rows]
            assert term.size == pytest.approx(float(each[seen].square().mean().sqrt()), rel=1e-6)
            mean = (each * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
            left = (each - mean)[seen].square().mean().sqrt()
            assert term.felt == pytest.approx(float(left), rel=1e-6)


def first_queries(model: Any, text: Tensor, without: tuple[str, ...]) -> Tensor:
    """Queries of the first attention with some embeddings set to zero."""
    bare = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in bare.named_parameters():
            if any(part in name for part in without):
                weight.zero_()
    return split_by_position(bare, text)[1][0]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "opt", "roberta"])
def test_content_is_what_a_model_without_positions_has_but_for_its_norm(kind: str) -> None:
    model, text = tiny(kind, "AutoModel"), tokens(12)[0]
    place = ("wpe", "position_embeddings", "embed_positions")
    content = split_by_position(model, text)[2][0]
    constant = first_queries(model, text, (*place, "wte", "word_emb", "token_type", "embed_tokens"))
    alone = first_queries(model, text, place)
    assert not torch.allclose(content, alone, atol=1e-2)  # the norm of the sum is another
    a, b = (x.transpose(0, 1).flatten(1) for x in (content - constant, alone - constant))
    torch.testing.assert_close(torch.cosine_similarity(a, b), torch.ones(12, dtype=torch.float64))


def test_rotary_models_have_no_such_terms() -> None:
    assert qk_terms(decoder("llama"), ids(12)[0], torch.arange(12)) is None
