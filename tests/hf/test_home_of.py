"""Before training: which stock model a scheme has for a home, or why it has none."""

import pytest

from longitude import UserError, parse
from longitude.training.to_hf import NAME, home_of

from .test_home import HOMES


@pytest.mark.parametrize("scheme", HOMES)
def test_a_home_is_told_before_training(scheme: str) -> None:
    block, kind = HOMES[scheme]
    told = home_of(parse(scheme), block)
    assert told.kind == kind
    assert told.why.endswith(f"trains a {NAME[kind]}: stock transformers loads the result.")
    other = home_of(parse(scheme), "gpt" if block == "llama" else "llama")
    assert other.kind is None
    assert f"the {block} block makes it a {NAME[kind]}." in other.why


@pytest.mark.parametrize("block", ["llama", "gpt"])
@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("causal()", "each alone and causal"),
        ("rope() + bidirectional()", "each alone and causal"),
        ("rope() + window(8)", "each alone and causal"),
        ("rope() + logn(32)", "each alone and causal"),
        ("rope() + alibi()", "each alone and causal"),
        ("rope() + learned(32)", "each alone and causal"),
        ("alibi(steepness=4)", "each alone and causal"),
        ("alibi_interpolated(2)", "each alone and causal"),
        ("learned(32, offset=2)", "each alone and causal"),
        ("sinusoidal()", "each alone and causal"),
        ("t5()", "each alone and causal"),
        ("rope(pairs='adjacent')", "pairs the halves of a head"),
        ("rope(fraction=0.5)", "turns whole heads"),
        ("rope(remap=inverse_leaky(16, 2))", "no name for inverse_leaky"),
        ("rope(decay=xpos())", "no name for xpos"),
        ("rope(frequencies=ntk(4))", "no name for ntk"),
        ("rope(frequencies=dynamic_ntk(64, 4))", "dynamic NTK begins at its window"),
        ("layers(rope(), causal())", "layers differ"),
        ("randomized(64) + rope()", "read at the positions of randomized(64)"),
    ],
)
def test_no_home_is_told_in_one_sentence(scheme: str, why: str, block: str) -> None:
    told = home_of(parse(scheme), block)
    assert told.kind is None
    assert "has no home in stock transformers: " in told.why and why in told.why
    assert told.why.endswith(".") and told.why.count(". ") == 0


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(UserError, match="no block is called 'mamba': use llama or gpt"):
        home_of(parse("rope()"), "mamba")
