"""Every known issue of runtimes, as settings that lint catches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longitude import parse
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.runtimes import runtimes, select
from longitude.runtimes.api import LintOptions
from longitude.runtimes.api import lint as lint_model
from longitude.runtimes.effective import ISSUES, Effective, difference
from longitude.runtimes.lint import explain, read_settings
from tests.runtimes.configs import (
    DYNAMIC,
    LINEAR,
    LLAMA3,
    LONGROPE,
    ORIGINAL,
    RISING,
    YARN,
    both,
    five,
    gguf,
    lint,
)

THETALESS = {k: v for k, v in YARN.items() if k != "rope_theta"}
OWN_FACTOR = {**YARN, "attention_factor": 1.3}
EQUAL = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
QUANTITIES = {"frequencies", "attention", "length", "remap", "start"}
BASE = {"rope_type": "default", "rope_theta": 1e5}
PLAIN = five(BASE, 8192)
SCALED = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
SCALED["rope__scaling__original_context_length"] = 8192

CAUGHT: dict[str, tuple[str, dict[str, Any], str]] = {
    "sglang's attention factor": ("sglang", both(OWN_FACTOR), "attention factor ignored"),
    "mlx's": ("mlx", both(OWN_FACTOR), "attention factor ignored"),
    "tensorrt's": ("tensorrt-llm", both(OWN_FACTOR), "attention factor ignored"),
    "old vllm's": ("vllm==0.28.0", both(OWN_FACTOR), "attention factor ignored"),
    "vllm's for longrope": (
        "vllm",
        both({**EQUAL, "attention_factor": 1.3}, **{"--max-model-len": 32768}),
        "attention factor ignored",
    ),
    "dead attention key": (
        "llama.cpp",
        gguf(**SCALED, rope__scaling__yarn_attn_factor=1.5),
        "dead attention key",
    ),
    "dead betas": ("llama.cpp", gguf(**SCALED, rope__scaling__yarn_beta_fast=8.0), "dead betas"),
    "converted": ("llama.cpp", both({**YARN, "beta_fast": 8.0}), "dead betas"),
    "not loaded": ("llama.cpp", gguf("qwen3") | {"rope_freqs.weight": RISING}, "tensor not loaded"),
    "ratio in 4.51": ("transformers==4.51.3", both(YARN, 8192), "factor from lengths"),
    "ratio in exllama": ("exllama", both(YARN, 8192), "factor from lengths"),
    "ramp in 4.44": ("transformers==4.44.2", both(YARN), "other original"),
    "whole number": ("vllm", both({**LINEAR, "factor": 4}), "whole number"),
    "whole number, sglang": ("sglang", both({**LINEAR, "factor": 4}), "whole number"),
    "vllm drops theta": (
        "vllm",
        {**PLAIN, "--hf-overrides": {"rope_parameters": THETALESS}},
        "theta dropped",
    ),
    "the setter drops theta": (
        "transformers",
        {**PLAIN, "from_pretrained": {"rope_scaling": THETALESS}},
        "no theta",
    ),
    "a keyword that is not read": (
        "transformers",
        {**PLAIN, "from_pretrained": {"rope_theta": 5e6}},
        "theta beside",
    ),
    "linear twice": ("vllm", both(LINEAR), "length counted twice"),
    "linear twice, sglang": ("sglang", both(LINEAR), "length counted twice"),
    "tokenizer": (
        "vllm",
        {**both(YARN), "tokenizer_config.json": {"model_max_length": 8192}},
        "tokenizer's length",
    ),
    "longer than derived": ("vllm", {**PLAIN, "--max-model-len": 32768}, "length refused"),
    "context": ("llama.cpp", gguf() | {"-c": 65536}, "context cap"),
    "dynamic, vllm": ("vllm", both(DYNAMIC, 8192), "dynamic is static"),
    "dynamic, llama.cpp": ("llama.cpp", both(DYNAMIC, 8192), "dynamic is static"),
    "dynamic, exllama": ("exllama", both(DYNAMIC, 8192), "unknown type"),
    "version 5 alone": ("mlx", five(LLAMA3), "rope_parameters unread"),
    "GGUF in transformers": ("transformers", gguf(**SCALED), "scaling dropped"),
    "Gemma 3": (
        "sglang",
        five({"full_attention": YARN, "sliding_attention": BASE}) | {"model_type": "gemma3_text"},
        "full layers unscaled",
    ),
    "truncate": ("mlx", both({**YARN, "truncate": False}), "truncate ignored"),
    "mscales": ("exllama", both({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}), "mscale ignored"),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_caught(name: str) -> None:
    runtime, settings, issue = CAUGHT[name]
    found = lint(settings, [runtime])
    assert not found.same
    assert issue in [t.name for t in found.rows[0].issues]


CHUNKED = {**PLAIN, "dual_chunk_attention_config": {"chunk_size": 4096, "local_size": 512}}


def test_dual_chunk_attention_is_sglangs_and_was_vllms() -> None:
    found = lint(CHUNKED, ["vllm==0.10", "sglang", "vllm==0.11", "vllm", "transformers", "mlx"])
    assert found.meant.remap == "dual_chunk(4096, 512)"
    assert [row.same for row in found.rows] == [True, True, False, False, False, False]
    assert all("dual chunk ignored" in [i.name for i in row.issues] for row in found.rows[2:])
    assert not lint(PLAIN, ["vllm"]).meant.remap


GEMMA = {
    "block_count": 12, "attention__sliding_window": 512, "attention__head_count": 4,
    "attention__key_length": 64, "rope__freq_base": 1e6, "rope__scaling__factor": 8.0,
    "rope__scaling__type": "linear",
}  # fmt: skip


def test_a_gguf_file_is_read_layer_by_layer() -> None:
    """Gemma 3's: the base is of the layers that see everything, and so is the scaling."""
    found = lint(gguf("gemma3", **GEMMA), ["llama.cpp"])
    full, local = found.layers
    assert full == ("base 1,000,000", (5, 11))
    assert local == ("base 10,000, a window of 512 tokens", (0, 1, 2, 3, 4, 6, 7, 8, 9, 10))
    table = found.table()
    assert "layers 0–4, 6–10: base 10,000" in table and "layers 5, 11: base 1,000,000" in table
    stated = gguf("gemma3", **GEMMA, rope__freq_base_swa=5e4)
    assert lint(stated, ["llama.cpp"]).layers[1][0].startswith("base 50,000")
    alike = gguf("gemma3", **{**GEMMA, "rope__freq_base": 1e4})
    assert not lint(alike, ["llama.cpp"]).layers and not lint(gguf(), ["llama.cpp"]).layers


NOTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic": ("transformers", five(DYNAMIC, 8192), "decode differs"),
    "longrope": ("vllm", both(LONGROPE, **{"--max-model-len": 32768}), "longrope switch"),
    "BOS": ("transformers", gguf("gemma"), "no BOS"),
    "num_ctx": ("ollama", gguf(), "context of its own"),
}


@pytest.mark.parametrize("name", NOTED)
def test_noted(name: str) -> None:
    runtime, settings, issue = NOTED[name]
    found = lint(settings, [runtime])
    assert found.same and issue in [t.name for t in found.rows[0].notes]


def test_static_scaling_is_noted_once() -> None:
    assert [t.name for t in lint(both(YARN), ["vllm"]).notes] == ["short inputs"]
    assert not lint(PLAIN, ["vllm"]).notes


FAULTS = {
    "no theta": five(THETALESS),
    "two dictionaries": {**five({"rope_type": "default", "rope_theta": 5e5}), "rope_scaling": YARN},
    "no original": five({k: v for k, v in YARN.items() if k != ORIGINAL}),
    "two types": five({**YARN, "type": "linear"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_file_are_told_too(name: str) -> None:
    found = lint(FAULTS[name], ["transformers"])
    assert not found.same and name in [fault.name for fault in found.faults]


RIGHT = [both(YARN), both(LLAMA3), both({"rope_type": "default", "rope_theta": 4e6})]
RIGHT.append(
    both({**EQUAL, "type": "longrope"}, model_type="phi3")
)  # whose lists llama.cpp's converter writes


@pytest.mark.parametrize("settings", RIGHT, ids=["yarn", "llama3", "base", "longrope"])
def test_what_every_runtime_reads_alike_has_no_traps(settings: dict[str, Any]) -> None:
    found = lint(settings)
    assert found.same, [(r.runtime, r.difference) for r in found.rows if not r.same]


def test_overrides_that_are_whole_are_right() -> None:
    told = {"rope_parameters": YARN, "max_position_embeddings": 32768}
    assert lint({**PLAIN, "--hf-overrides": told, "--max-model-len": 32768}, ["vllm"]).same


def test_against_a_scheme() -> None:
    asked = parse("rope(base=100000, frequencies=yarn(4, original=8192))")
    assert isinstance(asked, Scheme)
    assert lint(both(YARN), scheme=asked).same
    assert lint(gguf(**SCALED), ["llama.cpp"], asked).same
    other = lint(both(OWN_FACTOR), ["transformers"], asked)
    assert other.rows[0].difference.attention == pytest.approx(1.3 / 1.1386294361 - 1)
    assert [t.name for t in other.rows[0].issues] == ["other attention"]


def test_a_difference_without_a_known_issue_is_reported_too() -> None:
    found = lint(both(YARN), ["transformers"]).rows[0].found
    twice = tuple(2 * f for f in found.inv_freq)
    away = difference(Effective(twice, 2.0, 99), found)
    assert away.frequencies == pytest.approx(0.5) and away.attention > 0.4
    issues, _ = explain(runtimes()["transformers"], found, away)
    names = {"other frequencies", "other attention", "other length"}
    assert {issue.name for issue in issues} == names
    fewer = replace(found, inv_freq=found.inv_freq[1:])
    assert difference(fewer, found).frequencies == float("inf")


def test_every_issue_has_a_sentence_and_a_fix() -> None:
    for runtime in runtimes().values():
        for issue in (*ISSUES.values(), *runtime.issues):
            assert issue.sentence.endswith(".") and issue.fix.endswith(".")
            assert set(issue.affects.split()) <= QUANTITIES


def test_settings_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(both(YARN)))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 8192}')
    for name in (tmp_path, tmp_path / "config.json"):
        settings = read_settings(str(name))
        assert settings["tokenizer_config.json"] == {"model_max_length": 8192}
        assert not lint(settings, ["vllm"]).same


def test_user_errors() -> None:
    assert [(r.name, v) for r, v in select("vllm==0.28, mlx")] == [("vllm", "0.28"), ("mlx", None)]
    with pytest.raises(UserError, match="no runtime is called 'vlm'"):
        select("vlm")
    with pytest.raises(UserError, match="has no rotation to lint"):
        lint({"model_type": "bloom", "hidden_size": 64, "n_head": 4})
    for kind in ("t5", "mamba"):  # neither states a longest input, and Mamba no heads
        with pytest.raises(UserError, match=f"type {kind} has no rotation to lint"):
            lint({"model_type": kind, "d_model": 64, "num_heads": 4})
    with pytest.raises(UserError, match="a version is made of numbers"):
        lint(both(YARN), ["mlx==newest"])
    for version in ("transformers==3.5", "transformers==6", "vllm==0.33", "llama.cpp==b99999"):
        with pytest.raises(UserError, match=r"was checked in .* may compute something else"):
            select(version)
    select("transformers==5.22.9,vllm==0.10,sglang==0.5.24,llama.cpp==b7394")  # those may be given


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 3840, "num_attention_heads": 16}])
def test_sizes_that_a_file_leaves_to_its_class(sizes: dict[str, int]) -> None:
    """As google/gemma-3-4b-it's and -12b-it's do, with the base: 3840 / 16 is no head of theirs."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    text = {"model_type": "gemma3_text", "rope_scaling": scaling, **sizes}
    found = lint({"model_type": "gemma3", "text_config": text}, ["transformers", "vllm", "mlx"])
    assert found.meant.length == 131072 and found.same
    assert found.meant.inv_freq == pytest.approx([1e6 ** (-i / 128) / 8 for i in range(128)])


@pytest.mark.parametrize("junk", [None, "x", -1, 0, True, [], {}, [1.0] * 32], ids=repr)
@pytest.mark.parametrize("key", ["factor", ORIGINAL, "rope_theta", "beta_fast", "rope_type"])
def test_nonsense_is_told_and_never_a_traceback(key: str, junk: Any) -> None:
    plain = five({"rope_type": "default", "rope_theta": 10000.0, key: junk})
    overridden = {**both(YARN), "--hf-overrides": {key: junk}}
    for settings in (five({**YARN, key: junk}), plain, overridden):
        found = lint(settings)
        assert found.rows and json.dumps(found.to_json(), allow_nan=False)


def test_a_stretch_that_makes_no_rotation() -> None:
    crossed = both({**YARN, "beta_fast": 1.0, "beta_slow": 32.0})
    found = lint(crossed)
    assert not found.same and "bounds crossed" in [fault.name for fault in found.faults]


def test_a_report_is_text_markdown_or_a_page(tmp_path: Path) -> None:
    found = lint_model("tiny-rope", options=LintOptions(runtimes="vllm"))
    text, page = (found.report(tmp_path / f"lint.{kind}").read_text() for kind in ("txt", "html"))
    assert text == found.table() + "\n" and "<html" in page
    with pytest.raises(UserError, match=r"end its name in \.html, \.md or \.txt"):
        found.report(tmp_path / "lint.pdf")
