"""Words to copy: code that runs, and what longitude export says."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest
import torch

from longitude import attention, parse
from longitude.core.validate import UserError
from longitude.explorer.methods import snippets
from longitude.explorer.state import Column, PageState, start_from
from longitude.runtimes.target import make_target
from tests.runtimes.configs import emulate


def asked(method: str, **more: Any) -> PageState:
    return PageState(**more, columns=(Column(method),))


def test_the_code_to_copy_runs() -> None:
    found = snippets(asked("leaky_rerope", window=32, length=64, dim=16, heads=2), 0)
    told = {c["title"]: c["text"] for c in found["code"]}
    held: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    exec(compile(told["Attention in PyTorch"], "copied", "exec"), held)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 16)
    scheme = parse(found["scheme"]).layer(0)
    torch.testing.assert_close(held["out"], attention(scheme, q, k, v, range(64), range(64)))
    assert found["scheme"] in told["Draw it in the terminal"]


def test_exports_compute_the_scheme() -> None:
    found = snippets(asked("yarn"), 0)
    by = {e["runtime"]: e for e in found["exports"]}
    want = make_target(parse(found["scheme"]), _config(), 16384)
    assert found["target"] == 16384
    merged = {**_config(), **by["transformers"]["config"]}
    made = emulate("transformers", merged)
    assert made.inv_freq == pytest.approx(want.inv_freq)
    assert made.attention == pytest.approx(want.attention)
    assert "--rope-scaling yarn --rope-scale 4.0" in by["llama.cpp"]["text"]
    override = by["vLLM"]["text"].split("--hf-overrides ")[1].strip().strip("'")
    assert json.loads(override)["rope_parameters"]["rope_type"] == "yarn"
    assert not any(
        "{" + name + "}" in e["text"]
        for e in by.values()
        if e["text"]
        for name in ("folder", "file")
    )


def test_what_no_settings_say_is_refused_by_name() -> None:
    by = {e["runtime"]: e for e in snippets(asked("leaky_rerope"), 0)["exports"]}
    assert "lh.load" in by["transformers"]["text"]
    assert by["SGLang"]["text"] is None and "nearest" in by["SGLang"]["refused"]
    assert "vllm serve" in by["vLLM"]["text"] and "longitude's plugin" in by["vLLM"]["notes"][0]


def test_a_model_is_exported_under_its_name() -> None:
    state = start_from("tiny-rope")
    found = snippets(state, 1)
    assert "yarn(4, original=256)" in found["scheme"]
    assert any('lh.load("tiny-rope")' in c["text"] for c in found["code"])
    vllm = next(e for e in found["exports"] if e["runtime"] == "vLLM")
    assert "tiny-rope" in vllm["text"] and "--max-model-len 1024" in vllm["text"]


@pytest.mark.parametrize("own", ["alibi()", "learned(512)", "t5()", "layers(rope(), causal())"])
def test_every_kind_of_model_has_snippets(own: str) -> None:
    state = PageState(own=own, window=512, length=2048, columns=(Column("own"),))
    found = snippets(state, 0)
    assert found["scheme"] == own
    assert all(bool(e["text"]) != bool(e["refused"]) for e in found["exports"])


def test_a_name_that_a_link_says_stays_a_name_in_what_is_copied() -> None:
    name = 'x"); print(1) #; $(touch y)'
    found = snippets(PageState(model=name, columns=(Column("yarn"),)), 0)
    told = {c["title"]: c["text"] for c in found["code"]}
    _, load, _ = ast.parse(told["A Hugging Face model"]).body
    assert isinstance(load, ast.Assign) and isinstance(load.value, ast.Call)
    assert ast.literal_eval(load.value.args[0]) == name
    assert shlex.split(told["Measure it on the model"])[:3] == ["longitude", "extend", name]
    by = {e["runtime"]: e["text"] for e in found["exports"]}
    assert shlex.split(by["vLLM"])[:3] == ["vllm", "serve", name]
    for plain in ("llama.cpp", "llama.cpp (GGUF)", "mlx-lm", "exllama"):
        assert not set("$;#(\"'") & set(by[plain]), plain


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(UserError, match="there are 1"):
        snippets(asked("yarn"), 1)


def _config() -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
