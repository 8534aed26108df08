"""A patched model over two and four ranks has the logits and the tokens of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hf.rank_cells import PROMPTS, cells
from tests.processes import run

SENTENCES = {
    "no positions": "over a group each rank runs its own tokens: give their position_ids",
    "static cache": "over a group generate() needs a dynamic cache",
    "overlap": "ranks 0 and 1 both hold a key at position 0",
    "hybrid": "Qwen3NextForCausalLM has layers that read tokens in order",
    "learned": "GPT2LMHeadModel adds positions at its input",
}
# found at the first layer, though layers before the last ones are the same and need no gradients
DIFFERENT = {
    "schemes": "different schemes",
    "dtypes": "different dtypes",
    "gradients": "different needs of gradients",
    "batches": "different batches, heads or head sizes",
}


@pytest.mark.parametrize("count", [2, 4])
def test_logits_tokens_and_refusals_over_ranks(tmp_path: Any, count: int) -> None:
    for found in run("tests.hf.rank_cells", tmp_path, count):
        assert len(found["logits"]) == len(cells(count))
        assert all(error <= 1e-5 for error in found["logits"].values()), found["logits"]
        assert len(found["generate"]) == len(cells(count)) * len(PROMPTS)
        assert all(found["generate"].values()), found["generate"]
        assert found["mistakes"].keys() == SENTENCES.keys(), found["mistakes"]
        for name, sentence in SENTENCES.items():
            assert found["mistakes"][name].startswith(sentence), found["mistakes"][name]
        # a header and positions, of queries as well by heads; decoding four outputs and a header
        told = {"tokens": 2, "heads": 4, "generate": 2 + 2 * (4 + 1)}
        assert count != 2 or found["gathers"] == told
        for name, words in DIFFERENT.items():
            said = found["disagreements"][name]
            assert said.startswith(f"rank 0 and rank {count - 1} call attention with {words}"), said
