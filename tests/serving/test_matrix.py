"""vLLM with our plugin gives what `longitude.hf.patched` gives, in every situation of a server.

One engine for each model and scheme: its cache is small, so that requests preempt each other, and a
prompt longer than its window is read in chunks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.serving.engines import check, engine, generate, preemptions, saved, small_model, tokens

MODELS = ("llama", "gemma3_text", "glm4", "tiny-rope")  # grouped heads; windows; half of each head,
# in adjacent pairs; a trained one
SCHEMES = (
    "rope(remap=rerope({half}))",
    "rope(remap=leaky_rerope({half}, 8))",
    "rope(remap=self_extend(4, {half}))",
    "rope(remap=dual_chunk({half}, 8))",
    "rope(remap=streaming(4, {half}))",
    "rope(frequencies=stepped('yarn', original={window}))",
    "rope(frequencies=yarn(4, original={window}), remap=rerope({half})) + logn({window})",
    "split(rope(remap=rerope({half})), rope(frequencies=linear(4)) + window({half}, 4))",
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", MODELS)
def test_every_situation_equals_patched(kind: str, scheme: str, folders: Path) -> None:
    window = small_model(kind).config.max_position_embeddings
    text = scheme.format(window=window, half=window // 2)
    # layers that differ in what they keep have blocks of their own
    groups = 4 if kind == "gemma3_text" and "split" in text else 1
    long, blocks = tokens(window * 5 // 2), groups * window * 4 // 16
    options = {"max_num_batched_tokens": window, "num_gpu_blocks_override": blocks + 4}
    with engine(saved(kind, folders / kind), text, "3x", disable_log_stats=False, **options) as llm:
        one = generate(llm, [tokens(window - 8, 1)])
        check(kind, text, one)
        unequal = generate(llm, [tokens(n, n) for n in (window // 2, 3, window + 5)])
        check(kind, text, unequal)
        chunked = generate(llm, [long])
        check(kind, text, chunked)
        again = generate(llm, [long + tokens(20, 7)])
        assert again[0].num_cached_tokens >= window
        check(kind, text, again)
        assert preemptions(llm) == 0
        # long enough that all four run at once and need a fifth and sixth block each
        many = generate(llm, [tokens(window - 2, 20 + n) for n in range(4)], max_tokens=24)
        assert preemptions(llm) > 0 or groups > 1  # whose cache must hold one request of each
        check(kind, text, many)
