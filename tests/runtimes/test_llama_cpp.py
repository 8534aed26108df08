"""What llama.cpp computes, by its own C code written down once more, pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longitude.runtimes import llama_cpp
from tests.runtimes.configs import LLAMA3, LONGROPE, RISING, YARN, both, emulate, gguf
from tests.runtimes.peers import close

ORIG = "rope__scaling__original_context_length"
YARNED: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    ORIG: 8192,
}


def rope_yarn(
    pair: int, base: float, scale: float, original: int, fast: float = 32, slow: float = 1
) -> float:
    """The angle of position 1: ggml_rope_yarn_corr_dims and rope_yarn of ggml-cpu/ops.cpp."""
    dims = 64

    def corr(turns: float) -> float:
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0.0, math.floor(corr(fast))), min(dims - 1, math.ceil(corr(slow)))
    extrapolated = base ** (-2 * pair / dims)
    y = (pair - low) / max(0.001, high - low)
    mix = 1 - min(1.0, max(0.0, y))
    return scale * extrapolated * (1 - mix) + extrapolated * mix


def test_yarn_by_keys() -> None:
    found = emulate("llama.cpp", gguf(**YARNED))
    close(found.inv_freq, [rope_yarn(i, 1e5, 0.25, 8192) for i in range(32)], 1e-9)
    assert found.attention == pytest.approx(1 + 0.1 * math.log(4))
    assert (found.length, found.issues) == (32768, ())


def test_yarn_by_flags() -> None:
    flags = {"--rope-scaling": "yarn", "--rope-scale": 4, "--yarn-orig-ctx": 8192, "-c": 16384}
    flags |= {"--yarn-beta-fast": 16, "--rope-freq-base": 5e5}
    found = emulate("llama.cpp", gguf() | flags)
    close(found.inv_freq, [rope_yarn(i, 5e5, 0.25, 8192, fast=16) for i in range(32)], 1e-9)
    assert found.length == 16384


def test_dead_keys() -> None:
    keys = gguf(**YARNED, rope__scaling__yarn_attn_factor=1.5, rope__scaling__yarn_beta_fast=8.0)
    found, plain = emulate("llama.cpp", keys), emulate("llama.cpp", gguf(**YARNED))
    assert (found.inv_freq, found.attention) == (plain.inv_freq, plain.attention)
    assert found.issues == ("dead betas", "dead attention key")
    assert llama_cpp.from_keys(keys, literal=True).attention == pytest.approx(1.5 * plain.attention)
    flag = gguf(**YARNED) | {"--yarn-attn-factor": 1.5}
    assert emulate("llama.cpp", flag).attention == plain.attention
    assert emulate("llama.cpp", flag, "b7000").attention == pytest.approx(1.5 * plain.attention)
    assert emulate("llama.cpp", gguf() | {"--yarn-attn-factor": 1.5}).attention == 1.5
    heeded = emulate(
        "llama.cpp",
        {k.replace("llama.", "grok."): v for k, v in keys.items()}
        | {"general.architecture": "grok"},
    )
    close(heeded.inv_freq, [rope_yarn(i, 1e5, 0.25, 8192, fast=8) for i in range(32)], 1e-9)


def test_divisors_and_the_factor_that_counts() -> None:
    keys = gguf(rope__scaling__type="none", rope__scaling__attn_factor=1.2, rope__scaling__factor=9)
    found = emulate("gguf", keys | {"rope_freqs.weight": RISING})
    close(found.inv_freq, [1e5 ** (-i / 32) / RISING[i] for i in range(32)], 1e-9)
    assert found.attention == pytest.approx(1.2)


def test_a_tensor_that_is_not_loaded() -> None:
    for keys in (gguf("qwen2"), gguf(rope__scaling__type="longrope")):
        found = emulate("llama.cpp", keys | {"rope_freqs.weight": RISING})
        assert not found.starts and found.issues == ("tensor not loaded",)
    lists = {"rope_factors_long.weight": RISING, "rope_factors_short.weight": RISING}
    assert not emulate("llama.cpp", gguf() | lists).starts
    assert emulate("llama.cpp", gguf("phi3") | lists).starts


def test_lists_by_the_context() -> None:
    lists = {"rope_factors_long.weight": [2.0] * 32, "rope_factors_short.weight": [1.0] * 32}
    keys = gguf(rope__scaling__original_context_length=8192, rope__scaling__type="longrope") | lists
    assert emulate("llama.cpp", keys).inv_freq[0] == pytest.approx(0.5)
    assert emulate("llama.cpp", keys | {"-c": 8192}).inv_freq[0] == pytest.approx(1.0)


def test_legacy_scale_is_linear_and_the_context_caps() -> None:
    found = emulate("llama.cpp", gguf(rope__scale_linear=2.0) | {"-c": 65536})
    close(found.inv_freq, [1e5 ** (-i / 32) / 2 for i in range(32)], 1e-9)
    assert (found.length, found.issues) == (32768, ("context cap",))


def test_ollama_takes_num_ctx_and_no_flags() -> None:
    keys = gguf(**YARNED) | {"--rope-freq-base": 9e9}
    found = emulate("ollama", keys | {"num_ctx": 16384})
    close(found.inv_freq, [rope_yarn(i, 1e5, 0.25, 8192) for i in range(32)], 1e-9)
    assert (found.length, found.issues) == (16384, ())
    assert emulate("ollama", keys).issues == ("context of its own",)


@pytest.mark.parametrize(("own", "kind"), [(YARN, "llama"), (LLAMA3, "llama"), (LONGROPE, "phi3")])
def test_as_the_converter_writes_a_config(own: dict[str, Any], kind: str) -> None:
    config = both(own, model_type=kind)
    found, meant = emulate("llama.cpp", config), emulate("transformers", config)
    close(found.inv_freq, list(meant.inv_freq), 1e-9)
    assert found.attention == pytest.approx(meant.attention)


def test_transformers_drops_the_scaling_of_a_gguf_file() -> None:
    found = emulate("transformers", gguf(**YARNED))
    close(found.inv_freq, [1e5 ** (-i / 32) for i in range(32)], 1e-9)
    assert (found.attention, found.issues) == (1.0, ("scaling dropped",))
