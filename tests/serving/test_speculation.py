"""Drafts from the prompt.

A file by itself, the last: numba, which vLLM's drafts bring, keeps further engines from starting in
one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.serving.engines import check, engine, generate, saved, tokens

REROPE = "rope(remap=rerope(32))"


def test_drafts_from_the_prompt(tmp_path: Path) -> None:
    import vllm

    if vllm.__version__.startswith("0.30."):
        pytest.skip("drafts of vLLM 0.30 itself need Triton, which its wheel for CPUs lacks")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    folder = saved("llama", tmp_path)
    with engine(folder, REROPE, 256, speculative_config=drafts, max_num_batched_tokens=64) as llm:
        repeated = generate(llm, [tokens(12) * 12, tokens(30)], max_tokens=16)
    check("llama", REROPE, repeated)
