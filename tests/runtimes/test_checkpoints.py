"""What runtimes make of released checkpoints, by the entries of their config.json."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.hf.rope_config import make_config
from longitude.options import ExportOptions
from longitude.runtimes.api import export
from longitude.runtimes.effective import Effective
from tests.runtimes.configs import ORIGINAL, emulate, lint

HEADS = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 8192}
SMALL = {"vocab_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "hidden_size": 64}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4}
DEEPSEEK = {"type": "yarn", "factor": 40, ORIGINAL: 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16}
LATENT |= {"q_lora_rank": None}
MINISTRAL = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL: 4096}
MINISTRAL |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LISTS = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
GAINS = {"short_mscale": 1.24, "long_mscale": 1.24}


def of(name: str, **entries: Any) -> Effective:
    """What a runtime computes from a config.json of these entries."""
    return emulate(name, {**HEADS, **entries})


@pytest.mark.parametrize("runtime", ["transformers", "vllm", "sglang", "llama.cpp", "exllama"])
def test_a_share_of_a_head_in_dimensions(runtime: str) -> None:
    gptj = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_positions": 1024}
    found = emulate(runtime, {**gptj, "rotary_dim": 64})
    assert len(found.inv_freq) == 32 and found.length == 1024
    assert len(of(runtime, model_type="minimax_m2", head_dim=64, rotary_dim=32).inv_freq) == 16


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "baichuan"},  # the 13B has ALiBi, the 7B a rotation: neither says so
        {"model_type": "chatglm", "rope_ratio": 50, "kv_channels": 128},
        {"model_type": "granitemoehybrid", "position_embedding_type": "nope", "rope_theta": 1e4},
        {"model_type": "falcon", "alibi": True, "rope_theta": 1e4},
    ],
    ids=lambda entries: entries["model_type"],
)
def test_what_does_not_rotate_is_not_linted(entries: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has no rotation to lint"):
        lint({**HEADS, **entries})


def test_phi_35_moe_multiplies_by_its_own_factors() -> None:
    longrope = {"type": "longrope", ORIGINAL: 4096, **LISTS, **GAINS}
    found = of("transformers", model_type="phimoe", rope_scaling=longrope)
    assert found.attention == 1.24


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_llama_cpp_has_deepseeks_factors(kind: str) -> None:
    found = of("llama.cpp", model_type=kind, rope_scaling=DEEPSEEK, **LATENT)
    assert found.attention == pytest.approx(1) and len(found.inv_freq) == 8


def test_llama_cpp_has_ministrals_factors() -> None:
    assert of("llama.cpp", model_type="ministral3", rope_parameters=MINISTRAL).attention == 1


def test_a_gguf_file_of_deepseek_means_what_llama_cpp_computes() -> None:
    keys = {"context_length": 163840, "rope.dimension_count": 64, "rope.freq_base": 1e4}
    keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 40.0}
    keys |= {"rope.scaling.original_context_length": 4096}
    keys |= {"rope.scaling.yarn_log_multiplier": 0.0707, "embedding_length": 64}
    file = {f"deepseek2.{key}": value for key, value in keys.items()}
    found = lint({"general.architecture": "deepseek2", **file}, ["llama.cpp"])
    assert found.same and found.meant.attention == pytest.approx(1)


def test_llama_4_and_mixtral_load_their_divisors() -> None:
    llama3 = {"rope_type": "llama3", "factor": 16.0, "rope_theta": 5e5, ORIGINAL: 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for kind in ("llama4_text", "mixtral"):
        assert lint({**HEADS, "model_type": kind, "rope_scaling": llama3}, ["llama.cpp"]).same


def test_what_the_converter_drops() -> None:
    """No list of factors but Phi's and MiniCPM's, llama3 for no Qwen, its original length only from
    beside the dictionary."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, ORIGINAL: 4096}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, ORIGINAL: 4096, **LISTS}
    cases = [("llama", longrope, "not converted"), ("qwen2", llama3, "not converted")]
    for kind, rope, issue in [*cases, ("llama", llama3, "other original")]:
        entries = {**HEADS, "model_type": kind, "rope_theta": rope["rope_theta"]}
        (row,) = lint({**entries, "rope_scaling": rope}, ["llama.cpp"]).rows
        assert row.difference.frequencies > 0.1 and issue in [each.name for each in row.issues]
    assert lint({**entries, "rope_scaling": llama3, ORIGINAL: 4096}, ["llama.cpp"]).same


@pytest.mark.parametrize("runtime", ["transformers", "llama.cpp", "mlx"])
def test_hunyuans_alpha_stretches_the_base(runtime: str) -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    kind = {"model_type": "hunyuan_v1_dense", "rope_theta": 1e4, "rope_scaling": scaling}
    found, base = of(runtime, **kind), 1e4 * 1000 ** (64 / 62)
    assert found.inv_freq == pytest.approx([base ** (-i / 32) for i in range(32)])


def test_gemma_3s_base_is_exllamas_default_too() -> None:
    kind = {"model_type": "gemma3_text", "head_dim": 64}
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert lint({**HEADS, **kind, "rope_scaling": scaling}, ["exllama"]).same


def test_servers_read_other_lengths_than_transformers() -> None:
    command_r = {"model_type": "cohere", "model_max_length": 131072}
    assert [of(name, **command_r).length for name in ("vllm", "sglang")] == [131072, 131072]
    vicuna = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}}
    vicuna |= {"max_position_embeddings": 4096, "max_sequence_length": 16384}
    assert [of(name, **vicuna).length for name in ("vllm", "sglang")] == [16384, 65536]


# exports, run by transformers itself

MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
EXPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "phi3": ({"pad_token_id": 0}, "yarn(4, original=64)"),  # no type but longrope is read
    "mixtral": (MOE, "yarn(4, original=64)"),  # transformers' yarn needs head_dim
    "deepseek_v3": ({"rope_scaling": DEEPSEEK, **LATENT, **ROUTED}, "yarn(80, original=4096)"),
    "ministral3": ({"rope_parameters": MINISTRAL, "head_dim": 16}, "ntk(4)"),
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_an_export_is_what_was_patched(kind: str, tmp_path: Path) -> None:
    more, frequencies = EXPORTED[kind]
    entries = {**SMALL, "max_position_embeddings": 64, "model_type": kind, **more}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(entries), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    scheme, ids = f"rope(frequencies={frequencies})", torch.arange(48)[None] % 32
    options = ExportOptions(scheme=scheme, to="4x", out=tmp_path / "out")
    export(tmp_path / "model", options=options)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad(), lh.patched(model, scheme):
        expected = model(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, expected, atol=1e-5, rtol=0)


def test_phi_35_moe_is_given_its_factors(tmp_path: Path) -> None:
    entries = {**SMALL, **MOE, "max_position_embeddings": 64, "model_type": "phimoe"}
    folder = saved(tmp_path / "model", **entries)
    options = ExportOptions(scheme="rope(frequencies=yarn(4, original=64))", weights="none")
    export(folder, options=replace(options, out=tmp_path / "out"))
    own = AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert own["long_mscale"] == own["short_mscale"] == pytest.approx(0.1 * math.log(4) + 1)


def saved(folder: Path, **entries: Any) -> Path:
    """A folder of these settings, without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


def test_what_does_not_rotate_is_not_exported(tmp_path: Path) -> None:
    alibi = saved(tmp_path / "bloom", model_type="bloom", hidden_size=64, n_head=4)
    nope = {"model_type": "granitemoehybrid", "position_embedding_type": "nope", **HEADS}
    for model in (alibi, saved(tmp_path / "granite", **nope)):
        options = ExportOptions(scheme="rope(frequencies=ntk(4))", to=8192, runtimes="all")
        with pytest.raises(UserError, match=r"has no rotation that .* could change"):
            export(model, options=options)
    gptj = saved(tmp_path / "gptj", model_type="gptj", n_embd=64, n_head=4, n_layer=1, rotary_dim=8)
    options = ExportOptions(scheme="rope(frequencies=ntk(4))", to=8192, runtimes="sglang")
    with pytest.raises(UserError, match="no settings for the rotation of a model of type gptj"):
        export(gptj, options=options)


@pytest.mark.parametrize(
    ("entries", "scheme", "why"),
    [
        ({"model_type": "gptj", "rotary_dim": 8}, "rope(remap=rerope(32))", "it can't be patched"),
        ({"model_type": "falcon"}, "rope(remap=rerope(32))", "no attention of FalconForCausalLM"),
        ({"model_type": "bloom"}, "nope()", "which causal"),
        ({"model_type": "mpt"}, "nope()", "which causal"),
        ({"model_type": "gpt2"}, "nope()", "which causal"),
    ],
)
def test_no_folder_is_written_that_we_could_not_load(
    entries: dict[str, Any], scheme: str, why: str, tmp_path: Path
) -> None:
    sizes = {"n_embd": 64, "hidden_size": 64, "d_model": 64, "n_layer": 2, "num_hidden_layers": 2}
    heads = {"n_layers": 2, "n_head": 4, "n_heads": 4, "num_attention_heads": 4, "vocab_size": 99}
    own = {name: n for name, n in (sizes | heads).items() if entries["model_type"] != "mpt"}
    model = saved(tmp_path / "model", **own, **entries)
    options = ExportOptions(scheme=scheme, to=512, weights="none", out=tmp_path / "out")
    with pytest.raises(UserError, match=rf"longitude.hf.load would refuse the folder: .*{why}"):
        export(model, options=options)
    assert not (tmp_path / "out").exists()


def test_every_length_of_a_file_is_raised(tmp_path: Path) -> None:
    command_r = {"model_type": "cohere", "model_max_length": 8192, "rope_theta": 1e4, **HEADS}
    folder = saved(tmp_path / "model", **command_r)
    options = ExportOptions(scheme="rope(frequencies=ntk(4))", to="4x", weights="none")
    options = replace(options, runtimes="transformers,vllm,sglang", out=tmp_path / "out")
    first, *servers = export(folder, options=options).exports
    assert first.config and first.config["model_max_length"] == 32768
    assert all('"model_max_length": 32768' in str(server.text) for server in servers)


def test_axolotl_sets_nothing_inside_a_configuration(tmp_path: Path) -> None:
    text = {"model_type": "llama4_text", "rope_theta": 5e5, **HEADS}
    folder = saved(tmp_path / "model", model_type="llama4", text_config=text)
    options = ExportOptions(scheme="rope(frequencies=ntk(4))", to="4x", runtimes="tensorrt-llm")
    assert "text_config" in str(export(folder, options=options).exports[0].text)
    with pytest.raises(UserError, match=r"outermost configuration, but .* in its text_config"):
        export(folder, options=replace(options, runtimes="axolotl"))


def test_types_of_layers_that_differ(tmp_path: Path) -> None:
    gemma = {"model_type": "gemma3_text", "head_dim": 64, "num_hidden_layers": 6, **HEADS}
    folder = saved(tmp_path / "model", **gemma)
    options = ExportOptions(scheme="rope(frequencies=ntk(4))", to="4x", weights="none")
    done = export(folder, options=replace(options, runtimes="all", out=tmp_path / "out"))
    told = {one.runtime.name: one for one in done.exports}
    own = dict(told["transformers"].config or {})["rope_parameters"]
    for kind, base in (("full_attention", 1e6), ("sliding_attention", 1e4)):
        assert own[kind]["rope_theta"] == pytest.approx(base * 4 ** (64 / 62))
    assert "plugin" in str(told["vllm"].settings), told["vllm"].refused
    assert "takes one rotation" in str(told["sglang"].refused)
