"""What mlx-lm, TensorRT-LLM, axolotl and torchtitan compute, by their formulas written down again;
and what no runtime is asked."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longitude.runtimes import runtimes
from tests.runtimes.configs import (
    DYNAMIC,
    LINEAR,
    LLAMA3,
    LONGROPE,
    ORIGINAL,
    RISING,
    YARN,
    both,
    emulate,
    five,
    four,
)
from tests.runtimes.peers import close
from tests.runtimes.test_llama_cpp import rope_yarn

PLAIN = [1e5 ** (-i / 32) for i in range(32)]
RAMP = [rope_yarn(i, 1e5, 0.25, 8192) for i in range(32)]


@pytest.mark.parametrize("runtime", ["mlx", "tensorrt-llm"])
def test_one_mscale_alone_counts(runtime: str) -> None:
    found = emulate(runtime, both({**YARN, "mscale": 2.0, "attention_factor": 1.9}))
    close(found.inv_freq, RAMP, 1e-9)
    assert found.attention == pytest.approx(1 + 0.2 * math.log(4))
    assert found.issues == ("attention factor ignored",)


@pytest.mark.parametrize("runtime", ["mlx", "tensorrt-llm"])
def test_longrope_has_its_factor_from_the_lengths(runtime: str) -> None:
    found = emulate(runtime, both({**LONGROPE, "attention_factor": 1.9}, 16384))
    close(found.inv_freq, [PLAIN[i] / (2 * RISING[i]) for i in range(32)], 1e-9)
    assert found.attention == pytest.approx(math.sqrt(1 + math.log(2) / math.log(8192)))


def test_mlx_reads_what_stands_on_top() -> None:
    found = emulate("mlx", five(YARN))
    close(found.inv_freq, [1e4 ** (-i / 32) for i in range(32)], 1e-9)
    assert found.issues == ("rope_parameters unread",)
    close(emulate("mlx", {**five(YARN), "model_type": "qwen3"}).inv_freq, RAMP, 1e-9)
    told = {**five(YARN), "model_config": {"rope_theta": 1e5, "rope_scaling": YARN}}
    close(emulate("mlx", told).inv_freq, RAMP, 1e-9)


def test_tensorrt_llm_has_no_dynamic() -> None:
    found = emulate("tensorrt-llm", both(DYNAMIC, 8192))
    close(found.inv_freq, PLAIN, 1e-9)
    assert found.issues == ("dynamic is static",)
    stretched = emulate("tensorrt-llm", both({**DYNAMIC, "alpha": 4.0}, 8192))
    base = 1e5 * 4.0 ** (64 / 62)
    close(stretched.inv_freq, [base ** (-i / 32) for i in range(32)], 1e-9)


def test_tensorrt_llm_loses_the_theta_of_a_replaced_dictionary() -> None:
    own = {k: v for k, v in YARN.items() if k != "rope_theta"}
    told = {**five(YARN), "model_kwargs": {"rope_scaling": own}}
    assert "theta dropped" in emulate("tensorrt-llm", told).issues


def test_axolotl_is_transformers_with_a_length() -> None:
    plain = five({"rope_type": "default", "rope_theta": 1e5}, 8192)
    told = {"rope_parameters": YARN, "max_position_embeddings": 32768}
    found = emulate("axolotl", {**plain, "overrides_of_model_config": told, "sequence_len": 16384})
    close(found.inv_freq, RAMP, 1e-9)
    assert (found.attention, found.length) == (pytest.approx(1 + 0.1 * math.log(4)), 16384)


def test_torchtitan_turns_and_nothing_else() -> None:
    yarn = {"scaling": "yarn", "rope_factor": 4.0, "original_seq_len": 8192}
    found = emulate("torchtitan", {"dim": 64, "max_seq_len": 32768, "theta": 1e5, **yarn})
    close(found.inv_freq, RAMP, 1e-9)
    assert (found.attention, found.issues) == (1.0, ("temperature left out",))
    llama = {"scaling": "llama", "scaling_factor": 8.0, "theta": 5e5}
    same = emulate("torchtitan", {"dim": 64, "max_seq_len": 32768, **llama})
    assert same.inv_freq == emulate("transformers", both(LLAMA3)).inv_freq


def test_exllamav2_stops_at_both_types() -> None:
    assert emulate("exllama", four({**YARN, "type": "yarn"}), "0.3.2").issues == ("both types",)
    assert emulate("exllama", five(YARN), "0.3.2").issues[0] == "rope_parameters unread"


def test_vllm_before_032() -> None:
    found = emulate("vllm", both({**YARN, "attention_factor": 1.9}, 8192), "0.28.0rc2")
    assert found.attention == pytest.approx(1 + 0.1 * math.log(4))
    assert (found.length, found.issues) == (32768, ("attention factor ignored",))
    multiplied = emulate("vllm", both({**YARN, "attn_factor": 1.5}), "0.28.0")
    assert multiplied.attention == pytest.approx(1.5 * (1 + 0.1 * math.log(4)))


def test_vllm_with_overrides() -> None:
    plain = five({"rope_type": "default", "rope_theta": 1e5}, 8192)
    lost = {k: v for k, v in YARN.items() if k != "rope_theta"}
    found = emulate("vllm", {**plain, "--hf-overrides": {"rope_parameters": lost}})
    close(found.inv_freq, [rope_yarn(i, 1e4, 0.25, 8192) for i in range(32)], 1e-9)
    assert found.issues == ("theta dropped",)
    assert not emulate("vllm", {**plain, "--hf-overrides": {"rope_scaling": lost}}).starts
    assert emulate("vllm", {**plain, "--max-model-len": 9000}).issues == ("length refused",)
    told = {"rope_parameters": YARN, "max_position_embeddings": 32768}
    right = emulate("vllm", {**plain, "--hf-overrides": told, "--max-model-len": 16384})
    close(right.inv_freq, RAMP, 1e-9)
    assert (right.length, right.issues) == (16384, ())


def test_vllm_takes_the_shorter_of_file_and_tokenizer() -> None:
    config = {**both(YARN), "tokenizer_config.json": {"model_max_length": 8192}}
    found = emulate("vllm", config)
    assert (found.length, found.issues) == (8192, ("tokenizer's length",))


def test_sglang_merges_since_0523() -> None:
    plain = five({"rope_type": "default", "rope_theta": 1e5}, 32768)
    lost = {k: v for k, v in YARN.items() if k != "rope_theta"}
    told = {**plain, "--json-model-override-args": {"rope_scaling": lost}}
    close(emulate("sglang", told).inv_freq, RAMP, 1e-9)
    assert emulate("sglang", told, "0.5.10").issues == ("theta dropped",)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
def test_whole_numbers_stop_linear(runtime: str) -> None:
    assert (
        emulate(runtime, both({**LINEAR, "factor": 4})).issues
        == (("length counted twice", "whole number")[1:])
    )


@pytest.mark.parametrize("runtime", [r for r in runtimes() if r != "torchtitan"])
def test_a_larger_base_works_everywhere(runtime: str) -> None:
    found = emulate(runtime, both({"rope_type": "default", "rope_theta": 4e6}))
    close(found.inv_freq, [4e6 ** (-i / 32) for i in range(32)], 1e-9)
    assert (found.attention, found.length) == (1.0, 32768)


BROKEN: dict[str, dict[str, Any]] = {
    "missing key": {"rope_type": "linear", "rope_theta": 1e5},
    "unknown type": {"rope_type": "nonsense", "rope_theta": 1e5},
    "wrong list": {"rope_type": "longrope", "rope_theta": 1e5, ORIGINAL: 9}
    | {"short_factor": [1.0], "long_factor": [2.0]},
}


@pytest.mark.parametrize("runtime", ["transformers", "vllm", "sglang", "mlx", "tensorrt-llm"])
@pytest.mark.parametrize("trap", BROKEN)
def test_what_makes_no_rotation_does_not_start(runtime: str, trap: str) -> None:
    found = emulate(runtime, both(BROKEN[trap]))
    assert not found.starts and found.issues[-1] == trap
