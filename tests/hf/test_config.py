"""`rope_parameters`: transformers computes our frequencies from them, or we say it can't."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longitude import Mistake, parse
from longitude.hf.config import rope_parameters
from longitude.parts import Rope

NAMED = {
    "rope()": "default",
    "rope(base=500000)": "default",
    "rope(frequencies=linear(4))": "linear",
    "rope(base=500000, frequencies=llama3(8, original=64))": "llama3",
    "rope(frequencies=llama3(3, original=48, low=0.5, high=9))": "llama3",
    "rope(frequencies=yarn(4, original=64))": "yarn",
    "rope(frequencies=yarn(4, original=64, fast=20, slow=2, truncate=False))": "yarn",
    "rope(frequencies=yarn(4, original=64, attention_factor=2))": "yarn",
    "rope(frequencies=yarn(4, original=64, mscale=1, mscale_all_dim=0.5))": "yarn",
}
UNNAMED = [
    "rope(remap=rerope(8))",
    "rope(decay=xpos())",
    "rope(frequencies=ntk(4))",
    "rope(frequencies=yarn(4, original=64, ramp='paper'))",
    "rope(frequencies=stepped('yarn', original=64))",
]


def rope(text: str) -> Rope:
    made = parse(text).layer(0).rotary
    assert made
    return made


@pytest.mark.parametrize("text", NAMED)
def test_transformers_computes_the_same_frequencies(text: str, heard: list[str]) -> None:
    ours, dim = rope(text), 32
    parameters = rope_parameters(ours)
    assert parameters["rope_type"] == NAMED[text]
    config = LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    same = ours.frequencies.inv_freq(dim, ours.base, 64, dtype=torch.float32)
    assert torch.equal(theirs.inv_freq, same)
    assert theirs.attention_scaling**2 == ours.frequencies.gain(64)
    assert not heard


def test_the_share_of_a_head_that_turns_is_named() -> None:
    assert rope_parameters(rope("rope(fraction=0.25)"))["partial_rotary_factor"] == 0.25
    assert "partial_rotary_factor" not in rope_parameters(rope("rope()"))


@pytest.mark.parametrize("text", UNNAMED)
def test_what_transformers_has_no_name_for_is_refused(text: str) -> None:
    with pytest.raises(Mistake, match="transformers has no name for"):
        rope_parameters(rope(text))
