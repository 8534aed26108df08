"""What a GGUF file says of positions arrives, although transformers drops it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude import UserError
from longitude.hf import load
from longitude.hf.gguf_reader import read_header
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

IDS = torch.arange(48)[None] % 97


def scaled(parameters: dict[str, Any], **more: Any) -> Any:
    return decoder("llama", rope_parameters={"rope_theta": 5e4} | parameters, **more)


def agree(file: Path, stock: Any) -> None:
    """The file's model computes what the stock model does."""
    model, tokenizer = load(file, dtype="float32", quiet=True)
    assert tokenizer is None
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=0, atol=2e-6)


PLAIN = {"rope_type": "default"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
ORIGINAL = {"rope.scaling.original_context_length": 16}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 16,
    "attention_factor": 1.25,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "parameters, keys",
    [
        (PLAIN, {}),
        (PLAIN, {"rope.scaling.type": "none"}),
        ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
        (
            {"rope_type": "linear", "factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        ),
        (YARN, YARN_KEYS | ORIGINAL),
        (YARN | {"original_max_position_embeddings": 64}, YARN_KEYS),
        (YARN | {"beta_fast": 8.0}, YARN_KEYS | ORIGINAL | {"rope.scaling.yarn_beta_fast": 8.0}),
        (
            YARN | {"attention_factor": 1.5},
            YARN_KEYS | ORIGINAL | {"rope.scaling.attn_factor": 1.5 / (0.1 * math.log(4) + 1)},
        ),
    ],
    ids=["plain", "none", "legacy", "linear", "yarn", "no original", "betas", "gain"],
)
def test_scaling_by_keys(tmp_path: Path, parameters: dict[str, Any], keys: dict[str, Any]) -> None:
    stock = scaled(parameters)
    agree(write_gguf(tmp_path / "m.gguf", stock, keys), stock)
    if parameters != PLAIN:  # the test would see it
        with pytest.raises(AssertionError):
            agree(write_gguf(tmp_path / "bare.gguf", stock), stock)


def test_longrope_by_tensors(tmp_path: Path) -> None:
    stock = scaled(LONG)
    extra = {f"rope_factors_{n}.weight": LONG[f"{n}_factor"] for n in ("short", "long")}
    keys = ORIGINAL | {"rope.scaling.attn_factor": 1.25}
    agree(write_gguf(tmp_path / "m.gguf", stock, keys, extra), stock)


def divisors(stock: Any) -> list[float]:
    """What llama.cpp's converter keeps of Llama 3's scaling."""
    own = 5e4 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    return (own / stock.model.rotary_emb.inv_freq.double()).tolist()


def test_llama3_is_known_again(tmp_path: Path) -> None:
    stock = scaled(LLAMA3)
    extra = {"rope_freqs.weight": divisors(stock)}
    file = write_gguf(tmp_path / "m.gguf", stock, extra=extra)
    agree(file, stock)
    found = load(file, quiet=True)[0].config.rope_parameters
    assert found.pop("rope_type") == "llama3"
    wanted = {key: LLAMA3[key] for key in LLAMA3 if key != "rope_type"}
    assert found == pytest.approx(wanted | {"rope_theta": 5e4}, rel=1e-6)


@pytest.mark.parametrize("kind, factor", [("none", 1.0), ("linear", 4.0)], ids=["none", "linear"])
def test_a_gain_without_yarn_arrives(tmp_path: Path, kind: str, factor: float) -> None:
    both = {"short_factor": [factor] * 8, "long_factor": [factor] * 8}
    stock = scaled(LONG | both)
    keys = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0} | ORIGINAL
    keys |= {"rope.scaling.attn_factor": 1.25}
    agree(write_gguf(tmp_path / "m.gguf", stock, keys), stock)


def test_divisors_with_a_gain_and_a_linear_factor_arrive(tmp_path: Path) -> None:
    g = [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0]
    both = {name: [2 * d for d in g] for name in ("short_factor", "long_factor")}
    stock = scaled(LONG | both)
    keys = {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.25} | ORIGINAL
    agree(write_gguf(tmp_path / "m.gguf", stock, keys, {"rope_freqs.weight": g}), stock)


def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path: Path) -> None:
    stock = scaled({"rope_type": "linear", "factor": 4.0})
    agree(write_gguf(tmp_path / "m.gguf", stock, {"rope.scaling.factor": 4.0}), stock)


def test_other_divisors_stay_what_they_are(tmp_path: Path) -> None:
    g = [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0]
    both = {"short_factor": g, "long_factor": g, "attention_factor": 1.0}
    stock = scaled(LONG | both)
    agree(write_gguf(tmp_path / "m.gguf", stock, extra={"rope_freqs.weight": g}), stock)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope.scaling.yarn_log_multiplier": 0.1},
        {"rope.scaling.type": "spiral"},
        {"attention.sliding_window": 8},
    ],
    ids=["multiplier", "type", "window"],
)
def test_what_transformers_cant_be_told_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    file = write_gguf(tmp_path / "m.gguf", scaled(PLAIN), keys)
    with pytest.raises(UserError, match=r"load the model's own folder\.$"):
        load(file, quiet=True)


def test_a_gguf_model_is_plain_and_can_be_saved(tmp_path: Path) -> None:
    stock = scaled(YARN)
    model, _ = load(write_gguf(tmp_path / "m.gguf", stock, YARN_KEYS | ORIGINAL), quiet=True)
    model.save_pretrained(tmp_path / "plain")
    again, _ = load(tmp_path / "plain", quiet=True)
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_a_header_is_read_whole_or_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", scaled(PLAIN))
    keys = read_header(file).keys
    assert keys["general.architecture"] == "llama" and keys["llama.rope.freq_base"] == 5e4
    whole = file.read_bytes()
    cuts = [0, 3, 20, 30, 100, 400, 1000, len(whole) // 2, len(whole) - 1]
    for cut in cuts:
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match="cut short"):
            load(file, quiet=True)
    for wrong in (b"GGML" + whole[4:], whole[:4] + b"\x09" + whole[5:], b"GGUF" + b"\xff" * 200):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match=r"\.$"):
            load(file, quiet=True)


def test_the_real_header(smollm2_file: Path) -> None:
    header = read_header(smollm2_file)
    assert header.own("context_length") == 8192 and header.own("rope.freq_base") == 1e5
    assert header.keys["tokenizer.ggml.tokens"] == 49152 and header.scaling() == {}
