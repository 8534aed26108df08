"""The cost model has the bytes of the ring, the memory of a cache, and a measured rate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude import parse
from longitude.core.validate import target_length
from longitude.eval.prefill import Head
from longitude.extension import cost_model as costs
from longitude.extension.api import ExtendOptions, estimate
from longitude.extension.cost_model import (
    CLAIM,
    KERNEL_FLOPS,
    LAYER_COPIES,
    Sizes,
    cost_model,
    on_ranks,
)
from longitude.ops.ring import hops
from longitude.ops.shards import Shard
from longitude.training import distributed
from tests.hf.tiny import decoder

LLAMA_8B = Sizes(16_060_522_496, 8_030_261_248, 32, 32, 8, 128, 2)
ROWS = Path(__file__).parents[2] / "docs/results/benchmarks.jsonl"


@pytest.mark.parametrize("count", [2, 8])
def test_each_rank_sends_what_the_ring_passes_on(count: int) -> None:
    n = 1024
    pieces = [(r * n // (2 * count), n - r * n // (2 * count) - 1) for r in range(count)]
    zigzag = [Shard(n // count, n // count, span, span) for span in pieces]
    far = hops(zigzag, parse("rope()").areas())
    for rank in range(count):
        passed = sum(far[owner] > (rank - owner) % count for owner in range(count))
        each = 2 * 8 * 128 * 2 * (n // count)  # one block of keys and values in one layer
        assert LLAMA_8B.sent(n, count) == 32 * passed * each
    assert LLAMA_8B.sent(n, 1) == 0


def test_a_million_tokens_are_a_target() -> None:
    assert target_length("1m", 8192) == 2**20 and target_length("0.5M", None) == 2**19


def test_memory_and_time_of_a_known_model() -> None:
    assert LLAMA_8B.cache(131072) == 2**34  # 128 KiB per token
    alone, spread = (LLAMA_8B.seconds(2**20, ranks) for ranks in (1, 8))
    assert alone / 9 < spread <= alone / 7.9  # keys travel behind the attention over them
    linear, attention = 2 * 8_030_261_248 * 2**20, 2 * 2**40 * 32 * 128 * 32
    assert alone == pytest.approx((linear + attention) / KERNEL_FLOPS)


def test_every_length_is_weighed_on_one_device_and_the_target_over_ranks() -> None:
    model = decoder("llama")
    cells = cost_model(model, [64, 256])
    assert [(c.length, c.ranks) for c in cells] == [(64, 1), (256, 1), (256, 8), (256, 64)]
    assert all(c.weights == sum(p.nbytes for p in model.parameters()) and c.fits for c in cells)
    assert cells[1].cache == 4 * cells[0].cache == 8 * cells[2].cache


def test_memory_over_ranks_is_that_of_their_own_tokens() -> None:
    model = decoder("llama")
    config, weights = model.config, sum(p.nbytes for p in model.parameters())
    head = config.hidden_size // config.num_attention_heads
    key_values = 2 * config.num_key_value_heads * head * 4  # bytes of a token in a layer
    inner = 4 * config.intermediate_size + 2 * config.hidden_size
    layer = 4 * max(inner, 12 * config.hidden_size)
    for ranks in (1, 2, 4):
        tokens = 256 // ranks
        cache = config.num_hidden_layers * key_values * tokens
        expected = weights + cache + tokens * (layer + LAYER_COPIES * key_values)
        assert on_ranks(model, 256, ranks).memory == expected


def test_memory_is_about_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    with torch.device("meta"):  # SmolLM2-135M
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    model.tie_weights()
    monkeypatch.setattr(costs, "lm_head", lambda model: Head(model.lm_head, lambda x: x))
    rows = [
        json.loads(line) for line in (ROWS.parent / "smollm2-prose.jsonl").read_text().splitlines()
    ]
    peaks = {
        row["value"]["peak"]
        for row in rows
        if row["key"]["measure"] == "cost" and row["key"]["length"] == 32768
        if not row["value"]["refused"]
    }
    assert len(peaks) >= 1
    for peak in peaks:
        assert on_ranks(model, 32768, 1).memory == pytest.approx(peak, rel=0.1)
    # docs/results/smollm2.md, "A million tokens"
    assert on_ranks(model, 996_937, 1).memory == pytest.approx(29.5 * 2**30, rel=0.1)


@pytest.mark.parametrize(
    ("each", "size", "ranks", "said"),
    [
        ((100, 50), 2, 1, ""),
        ((191, 96), 2, 2, "need about 210 GiB, one GPU has 139: each text is split over 2 ranks"),
        # three would do, but don't divide eight
        ((330, 165, 110, 82.5), 8, 4, "GiB, one GPU has 139: each text is split over 4 ranks"),
        ((900, 450, 300, 225), 2, 2, "over 2 ranks; each rank needs 495 GiB, which may exceed"),
        ((191,), 1, 1, "GiB, one GPU has 139: memory may run out; torchrun shares each text"),
    ],
)
def test_the_fewest_ranks_that_hold_a_text_share_it(
    each: tuple[float, ...], size: int, ranks: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "device_bytes", lambda device: 139 * 2**30)

    def needed(n: int) -> float:
        return each[n - 1] * 2**30 if n <= len(each) else 0.0

    found, sentence = distributed.fewest_ranks(2**20, needed, size, torch.device("cuda"))
    assert found == ranks and said in sentence
    assert not sentence or sentence.startswith("1,048,576 tokens need about ")


def test_the_rate_is_that_of_a_recorded_row() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    (rate,) = [
        row["value"]["rate"]
        for row in rows
        if row["key"]["name"] == "leaky ReRoPE, window 4,096"
        and row["key"]["sizes"] == "1 × 32 heads (8 of keys) × 131,072 × 128, bfloat16"
        and row["key"]["way"] == "longitude"
        and "flash-attn-4" not in str(row["key"])  # which need not be installed
    ]
    assert pytest.approx(rate, rel=0.01) == KERNEL_FLOPS


def test_a_dry_run_prints_it_as_a_model(tmp_path: Any) -> None:
    found = estimate(to="4x", options=ExtendOptions(methods="linear", device="cpu", out=tmp_path))
    assert CLAIM in found.table() and "1,024 tokens on 64 × H200: weights" in found.table()
    last = found.to_json()["cost_model"][-1]
    assert last["ranks"] == 64 and last["sent"] > 0 and last["fits"]
