"""What vLLM, SGLang, exllamav3 and transformers 4 compute, asked of their own code.

Run with PEER_WHEELS=FOLDER (see tests/runtimes/peers.py): the wheels are large.
"""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runtimes.configs import DYNAMIC, LINEAR, LLAMA3, LONGROPE, ORIGINAL, YARN, both, emulate
from tests.runtimes.peers import attributes, close, function, loaded, turned, unpacked

LENGTH = "max_position_embeddings"
CASES: dict[str, dict[str, Any]] = {
    "plain": both({"rope_type": "default", "rope_theta": 5e5}),
    "linear": both(LINEAR),
    "dynamic": both(DYNAMIC, 2048),
    "llama3": both(LLAMA3),
    "yarn": both({**YARN, ORIGINAL: 1024}, 4096),
    "yarn, its factor": both({**YARN, "attention_factor": 1.3}),
    "yarn, attn_factor": both({**YARN, "attn_factor": 1.1}),
    "yarn, mscales": both({**YARN, "mscale": 0.7, "mscale_all_dim": 1.4}),
    "yarn, betas": both({**YARN, "beta_fast": 16.0, "truncate": False}),
    "yarn, too short": both(YARN, 16384),
    "yarn, too long": both(YARN, 65536),
    "longrope": both(LONGROPE),
    "longrope, mscales": both({**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.2}),
    "longrope, its factor": both({**LONGROPE, "attention_factor": 1.25}),
}
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[str, Path] = {}

    def found(wheel: str) -> Path:
        return done.setdefault(wheel, unpacked(wheel, tmp_path_factory.mktemp(wheel)))

    return found


def _table(rope: Any, long: bool, original: int) -> torch.Tensor:
    two = getattr(rope, "long_short_cos_sin_cache", None)
    return rope.cos_sin_cache if two is None else two[original if long else 0 :]


@cases
def test_vllm(name: str, wheels: Any) -> None:
    config, place = CASES[name], "vllm.model_executor.layers.rotary_embedding"
    found, own = emulate("vllm", config), config["rope_parameters"]
    folder = wheels("vllm-0.32")
    asked = SimpleNamespace(model_config=SimpleNamespace(max_model_len=found.length))
    with loaded("vllm", folder, place, place) as module:
        su = sys.modules[f"{place}.phi3_long_rope_scaled_rope"]
        vars(su)["get_current_vllm_config"] = lambda: asked
        rope = module.get_rope(64, config[LENGTH], True, own, torch.float32)
        frequencies, gain = turned(_table(rope, found.length > 8192, 8192))
    close(found.inv_freq, frequencies)
    assert found.attention == pytest.approx(gain, rel=1e-6)
    verify = function(
        folder / "vllm/config/model.py",
        "_get_and_verify_max_len",
        iter_rope_parameters=lambda c: iter([c.rope_parameters]),
        logger=logging.getLogger(),
        current_platform=SimpleNamespace(check_max_model_len=lambda n: n),
    )
    most = SimpleNamespace(derived_max_model_len_and_key=(config[LENGTH], LENGTH))
    theirs = verify(attributes(config), most, None, None, False, None)
    rows = _table(rope, found.length > 8192, 8192).shape[0]
    assert found.length == min(theirs, rows)


def test_vllm_stops_at_whole_numbers(wheels: Any) -> None:
    place, own = "vllm.model_executor.layers.rotary_embedding", {**LINEAR, "factor": 4}
    with loaded("vllm", wheels("vllm-0.32"), place, place) as module, pytest.raises(TypeError):
        module.get_rope(64, 2048, True, own, torch.float32)
    assert emulate("vllm", both(own, 2048)).issues[-1] == "whole number"


@cases
def test_sglang(name: str, wheels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f=None, **_: f or (lambda g: g))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    config, place = CASES[name], "sglang.srt.layers.rotary_embedding"
    own, folder = config["rope_parameters"], wheels("sglang")
    found = emulate("sglang", config)
    with loaded("sglang", folder, f"{place}.factory", place) as module:
        rope = module.get_rope(64, 64, config[LENGTH], own["rope_theta"], True, own, torch.float32)
        frequencies, gain = turned(_table(rope, found.length > 8192, 8192))
    close(found.inv_freq, frequencies)
    assert found.attention == pytest.approx(gain, rel=1e-6)
    file = folder / "sglang/srt/utils/hf_transformers/common.py"
    context = function(file, "get_context_length", CONTEXT_LENGTH_KEYS=[LENGTH])
    assert found.length == context(attributes(config))


@cases
def test_exllamav3(name: str, wheels: Any) -> None:
    config = CASES[name]
    own = config["rope_parameters"]
    found = emulate("exllama", config)
    with loaded("exllamav3", wheels("exllamav3"), "exllamav3.util.rope") as module:
        settings = module.RopeSettings(
            head_dim=64,
            rope_theta=own["rope_theta"],
            rope_scaling=own,
            max_position_embeddings=config[LENGTH],
        )
        if not found.starts:
            with pytest.raises(ValueError, match="Unknown rope_type"):
                module.RoPE("cpu", settings)
            return
        rope = module.RoPE("cpu", settings)
    close(found.inv_freq, rope.inv_freq.tolist())
    assert found.attention == pytest.approx(rope.attn_factor, rel=1e-6)


@pytest.mark.parametrize("version", ["4.57.6", "4.51.3", "4.44.2"])
@cases
def test_transformers_4(name: str, version: str, wheels: Any) -> None:
    config = CASES[name]
    found, place = emulate("transformers", config, version), "transformers.modeling_rope_utils"
    with loaded("transformers", wheels(f"transformers-{version}"), place) as module:
        vars(module)["torch"] = torch  # which it imports only where its package says so
        held = attributes({k: v for k, v in config.items() if k != "rope_parameters"})
        compute = module.ROPE_INIT_FUNCTIONS[config["rope_scaling"]["rope_type"]]
        theirs, gain = compute(held, torch.device("cpu"), seq_len=found.length)
    close(found.inv_freq, theirs.tolist())
    assert math.isclose(found.attention, gain, rel_tol=1e-9)
