"""What is written into a GGUF file says the scheme, by llama.cpp's formulas and to transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude import UserError, parse
from longitude.hf import load
from longitude.hf.gguf_reader import Header, read_header
from longitude.runtimes.gguf import Changes, changes, export_gguf
from longitude.runtimes.target import Target, make_target
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

DIM, HALF, WINDOW = 16, 8, 64
CONFIG = {"head_dim": DIM, "num_attention_heads": 4, "max_position_embeddings": WINDOW}
G = "1, 1, 1.5, 2, 3, 5, 7, 8"
SCHEMES = {
    "none": "unscaled()",
    "linear": "linear(4)",
    "base": "ntk(4)",
    "yarn": "yarn(4, original=64)",
    "gain": "yarn(4, original=64, attention_factor=1.5)",
    "betas": "yarn(4, original=64, fast=8, slow=2)",
    "ends": "yarn(4, original=64, truncate=False)",
    "paper": "yarn(4, original=64, ramp='paper')",
    "llama3": "llama3(8, original=64)",
    "parts": "by_parts(4, original=64)",
    "longrope": f"longrope(({G}), ({G}), original=64, factor=4)",
}


def asked(frequencies: str, base: float = 5e4, target: int = 256) -> Target:
    return make_target(parse(f"rope(base={base}, frequencies={frequencies})"), CONFIG, target)


def header(keys: dict[str, Any] | None = None, arch: str = "llama", **divisors: Any) -> Header:
    own = {"context_length": WINDOW, "rope.freq_base": 1e4} | (keys or {})
    named = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in own.items()}
    return Header(Path("m.gguf"), named, {f"{n}.weight": tuple(g) for n, g in divisors.items()})


def llama_cpp(held: dict[str, Any], arch: str = "llama") -> tuple[list[float], float]:
    """llama.cpp's formulas (ggml_rope_cache_init and rope_yarn), once more."""
    own = {k.removeprefix(f"{arch}."): v for k, v in held.items()}
    kind, base = own.get("rope.scaling.type", "linear"), own["rope.freq_base"]
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    scale, gain = 1.0 if kind == "none" else 1 / factor, own.get("rope.scaling.attn_factor", 1.0)
    g = own.get("rope_freqs.weight") or own.get("rope_factors_long.weight") or [1.0] * HALF
    ends = [
        DIM * math.log(own["rope.scaling.original_context_length"] / (turns * 2 * math.pi))
        / (2 * math.log(base))
        for turns in (32.0, 1.0)
    ]  # fmt: skip
    low, high = max(0, math.floor(ends[0])), min(DIM - 1, math.ceil(ends[1]))
    found = []
    for i in range(HALF):
        rate = base ** (-2 * i / DIM) / g[i]
        if kind == "yarn":
            mix = 1 - min(1, max(0, (i - low) / max(0.001, high - low)))
            found.append(rate * scale * (1 - mix) + rate * mix)
        else:
            found.append(rate * scale)
    return found, gain * (1 + 0.1 * math.log(factor)) if kind == "yarn" else gain


def agree(found: Changes, on: Header, want: Target, arch: str = "llama") -> None:
    held = found.applied(on)
    rates, gain = llama_cpp(held, arch)
    assert rates == pytest.approx(want.inv_freq, rel=1e-6)
    assert gain == pytest.approx(want.attention, rel=1e-6)
    assert held[f"{arch}.context_length"] == want.length


DIRTY = {
    "rope.scale_linear": 2.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.attn_factor": 1.1,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_attn_factor": 1.3,
    "rope.scaling.finetuned": True,
}


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_llama_cpp_computes_the_scheme(text: str) -> None:
    want = asked(text)
    factors = {f"rope_factors_{n}": [2.0] * HALF for n in ("long", "short")}
    for on in (header(), header(DIRTY), header(rope_freqs=[8.0] * HALF), header(**factors)):
        found = changes(on, want)
        agree(found, on, want)
        assert not any("yarn_" in name for name in found.applied(on))
        assert set(on.divisors) <= set(found.tensors)  # whatever was there says the scheme now
    assert changes(header(DIRTY), want).applied(header(DIRTY))["llama.rope.scaling.finetuned"]


def test_names_where_llama_cpp_has_them() -> None:
    kinds = {
        name: changes(header(), asked(text)).keys["llama.rope.scaling.type"]
        for name, text in SCHEMES.items()
    }
    assert kinds["linear"] == "linear" and kinds["yarn"] == kinds["gain"] == "yarn"
    assert {kinds[n] for n in ("none", "base", "betas", "ends", "llama3", "parts")} == {"none"}
    for name in ("none", "linear", "base", "yarn", "gain"):
        assert not changes(header(), asked(SCHEMES[name])).tensors


def test_who_does_not_know_the_tensor_is_refused_or_has_others() -> None:
    for arch in ("qwen2", "qwen3", "gemma3", "unheard-of"):
        for name in ("none", "linear", "base", "yarn", "gain"):
            want, on = asked(SCHEMES[name]), header(arch=arch)
            agree(changes(on, want), on, want, arch)
        with pytest.raises(UserError, match=rf"'{arch}'.*nearest it can serve is yarn\(4, "):
            changes(header(arch=arch), asked(SCHEMES["betas"]))
    want, on = asked(SCHEMES["betas"]), header(arch="phi3")
    found = changes(on, want)
    agree(found, on, want, "phi3")
    assert set(found.tensors) == {"rope_factors_long.weight", "rope_factors_short.weight"}


@pytest.mark.parametrize(
    "on, text, told",
    [
        (header(), "proportional(0.5)", "the frequency 0"),
        (header({"rope.scaling.yarn_log_multiplier": 0.1}), "linear(2)", "yarn_log_multiplier"),
    ],
)
def test_what_has_no_settings_is_refused(on: Header, text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        changes(on, asked(text))


def test_of_gemma_3_only_the_layers_that_see_everything_are_changed() -> None:
    """llama.cpp's windowed layers have a base and a scale of their own; YaRN's bounds and factor
    are of all layers."""
    keys = {"block_count": 6, "attention.sliding_window": 32, "rope.freq_base": 1e6}
    on = header(keys, arch="gemma3")
    for name in ("linear", "base"):
        want = asked(SCHEMES[name])
        agree(changes(on, want), on, want, "gemma3")
    for name in ("yarn", "gain"):
        with pytest.raises(UserError, match="windowed layers with a base of their own"):
            changes(on, asked(SCHEMES[name]))


def test_one_of_several_files_is_refused() -> None:
    on = header()
    on.keys["split.count"] = 3
    with pytest.raises(UserError, match="llama-gguf-split"):
        changes(on, asked("linear(2)"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("llama") / "in.gguf", decoder("llama"))


@pytest.mark.parametrize("text", SCHEMES.values(), ids=SCHEMES)
def test_transformers_reads_the_file_back(source: Path, tmp_path: Path, text: str) -> None:
    want = asked(text)
    export_gguf(source, tmp_path / "out.gguf", want)
    rotary = load(tmp_path / "out.gguf", quiet=True)[0].model.rotary_emb
    torch.testing.assert_close(
        rotary.inv_freq.double(),
        torch.tensor(want.inv_freq, dtype=torch.float64),
        rtol=2e-6,
        atol=0,
    )
    assert rotary.attention_scaling == pytest.approx(want.attention, rel=1e-6)
    found = read_header(tmp_path / "out.gguf")
    agree(Changes({}, {}), Header(found.path, found.keys, found.divisors), want)
