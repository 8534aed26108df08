"""What can't be served is refused in one sentence, before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from longitude.core.validate import UserError
from longitude.serving import register, settings
from tests.hf.tiny import config_of
from tests.serving.engines import HEADS

REROPE = "rope(remap=rerope(32))"
FACTORS = [1.0] * 8
MODELS = {
    "deepseek_v3": (REROPE, "multi-head latent attention"),
    "gpt2": (REROPE, "a learned vector for each position"),
    "bart": (REROPE, "a learned vector for each position"),
    "bert": (REROPE, "a learned vector for each position"),
}
SCHEMES = {
    "rope(remap=rerop(32))": "rerop",
    "rope(remap=rerope(32)": "rope",
    f"rope(frequencies=longrope({FACTORS}, {FACTORS}, original=64))": "8 factors for a rotary dim",
    "rope(remap=rerope(128))": "trained to 64",
    "rope(pairs='adjacent')": "was trained with",
    "rope()": "serve it without a scheme",
    "fire()": "has weights of its own",
    "rope(frequencies=dynamic_yarn(64))": r"use stepped\(…\)",
}


def write(folder: Path, kind: str = "llama", **more: Any) -> Path:
    from transformers import AutoConfig

    try:
        config = config_of(kind, **{**(HEADS if kind == "llama" else {}), **more})
    except KeyError:
        config = AutoConfig.for_model(kind, **more)
    names = {"deepseek_v3": "DeepseekV3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
    names |= {"bart": "BartForConditionalGeneration", "bert": "BertModel"}
    config.architectures = [names.get(kind, "LlamaForCausalLM")]
    config.save_pretrained(folder)
    return folder


def engine_config(folder: Path, entry: Any, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    register()
    given = {"additional_config": {"longitude": entry}} if entry is not None else {}
    given |= {"skip_tokenizer_init": True, "dtype": "float32"}
    return EngineArgs(str(folder), **{**given, **more}).create_engine_config()


@pytest.mark.parametrize("text", SCHEMES)
def test_a_scheme(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=SCHEMES[text]):
        engine_config(write(tmp_path), {"scheme": text, "to": 256})


@pytest.mark.parametrize("kind", MODELS)
def test_a_model(kind: str, tmp_path: Path) -> None:
    text, message = MODELS[kind]
    with pytest.raises(UserError, match=message):
        engine_config(write(tmp_path, kind), {"scheme": text, "to": 65536})


@pytest.mark.parametrize(
    ("entry", "more", "message"),
    [
        ({"scheme": REROPE, "to": 32}, {}, "reads 64 tokens as it is, but got a target of 32"),
        ({"scheme": REROPE, "to": "far"}, {}, "far"),
        ({"scheme": REROPE, "to": 256}, {"max_model_len": 512}, "is longer than the scheme's"),
        ({"scheme": REROPE, "length": 256}, {}, "takes scheme, to and force"),
        ({"scheme": 7}, {}, "correct it in --additional-config"),
        ("rerope", {}, "correct it in --additional-config"),
        ({"scheme": REROPE, "to": 256}, {"kv_cache_dtype": "fp8"}, "a cache of fp8"),
        ({"scheme": REROPE, "to": 256}, {"worker_cls": "a.Worker"}, "worker of its own"),
    ],
)
def test_settings(entry: Any, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        engine_config(write(tmp_path), entry, **more)


def test_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "TESTED", ("0.20", "0.21"))
    with pytest.raises(UserError, match=r"tested in vLLM 0\.20, 0\.21, but this is"):
        engine_config(write(tmp_path), {"scheme": REROPE, "to": 256})


def test_a_folder_names_its_scheme(tmp_path: Path) -> None:
    (tmp_path / "longitude.json").write_text(json.dumps({"scheme": REROPE, "to": "4x"}))
    config = engine_config(write(tmp_path), None)
    assert config.model_config.max_model_len == 256
    assert config.additional_config["longitude"]["scheme"] == REROPE
    assert config.parallel_config.worker_cls == settings.WORKER
    shorter = engine_config(tmp_path, None, max_model_len=100)
    assert shorter.model_config.max_model_len == 100
    (tmp_path / "longitude.json").write_text("{")
    with pytest.raises(UserError, match="is no JSON"):
        engine_config(tmp_path, None)
