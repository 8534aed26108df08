"""GGUF files' own keys, read without transformers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from longitude.core.text import parse
from longitude.hf.encodings import read_encodings
from longitude.hf.gguf_config import gguf_encodings, has_rotary
from longitude.hf.gguf_reader import read_header
from longitude.runtimes.checkpoint import gguf_config
from longitude.runtimes.llama_cpp import from_keys
from tests.hf.gguf_files import write_gguf
from tests.hf.tiny import decoder

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
ORIGINAL = {"rope.scaling.original_context_length": 16}
LLAMA3 = [1.0, 1.0, 1.0, 1.3, 2.7, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("keys", "tensors"),
    [
        ({}, {}),
        ({"rope.scale_linear": 4.0}, {}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
        ({**YARN, **ORIGINAL}, {}),
        ({**YARN, **ORIGINAL, "rope.scaling.yarn_beta_fast": 8.0}, {}),
        ({}, {"rope_freqs.weight": LLAMA3}),
    ],
)
def test_scalings_are_the_files_own(
    keys: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", decoder("llama"), keys, tensors))
    assert has_rotary(header)
    (found,) = gguf_encodings(header, gguf_config(header))
    assert found.kind == "rope" and found.head_dim == 16 and found.window == 64
    assert found.scheme and found.where == "llama.rope.* of the file"
    rope = parse(found.scheme).layer(0).rotary
    assert rope
    ours = rope.frequencies.inv_freq(16, rope.base, 64)
    theirs = from_keys({**header.keys, **header.divisors}, literal=True).inv_freq
    torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), rtol=2e-6, atol=0)


def header_of(path: Path, arch: str, **keys: float) -> Any:
    """A GGUF file of keys alone, written by hand: numbers as uint32 or float32."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def number(value: float) -> bytes:
        whole = isinstance(value, int)
        return struct.pack("<II" if whole else "<If", 4 if whole else 6, value)

    held = text("general.architecture") + struct.pack("<I", 8) + text(arch)
    for name, value in keys.items():
        held += text(f"{arch}.{name.replace('__', '.')}") + number(value)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 + len(keys)) + held + bytes(64))
    return read_header(path)


@pytest.mark.parametrize(
    ("arch", "keys", "scheme"),
    [
        ("gpt2", {}, "learned(512)"),
        ("bert", {}, "learned(512) + bidirectional()"),
        ("bloom", {}, "alibi()"),
        ("mpt", {"attention__max_alibi_bias": 16.0}, "alibi(steepness=16)"),
        ("t5", {"attention__relative_buckets_count": 32}, "t5()"),
        ("mamba", {}, None),
    ],
)
def test_architectures_that_turn_nothing(
    arch: str, keys: dict[str, float], scheme: str | None, tmp_path: Path
) -> None:
    sizes = {"context_length": 512, "embedding_length": 64, "attention__head_count": 4}
    header = header_of(tmp_path / "m.gguf", arch, **sizes, **keys)
    (found,) = gguf_encodings(header, None)
    assert not has_rotary(header) and found.scheme == scheme and found.window == 512


def test_gemma_3s_windowed_layers_have_a_base_of_their_own(tmp_path: Path) -> None:
    """Which no key need say: base and scaling are of the layers that see everything."""
    sizes = {"context_length": 512, "embedding_length": 64, "attention__head_count": 4}
    sizes |= {"block_count": 7, "attention__sliding_window": 32, "rope__freq_base": 1e6}
    header = header_of(tmp_path / "m.gguf", "gemma3", **sizes, rope__scaling__factor=8.0)
    (found,) = gguf_encodings(header, gguf_config(header))
    assert found.layers == (
        ("rope() + window(32)", (0, 1, 2, 3, 4, 6)),
        ("rope(base=1000000, frequencies=linear(8))", (5,)),
    )


@pytest.mark.parametrize("absorbed", [True, False])  # files of today, and those before
def test_deepseeks_latent_attention(absorbed: bool, tmp_path: Path) -> None:
    sizes = {"attention.key_length_mla": 192, "attention.key_length": 576}
    keys = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64, "embedding_length": 7168}
    keys |= sizes if absorbed else {"attention.key_length": 192}
    keys |= {"attention.head_count": 128, "context_length": 163840}
    yarn = {"rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096}
    yarn |= {"rope.scaling.yarn_log_multiplier": 0.1}
    header = header_of(tmp_path / "m.gguf", "deepseek2", **keys, **yarn)
    header.keys["deepseek2.rope.scaling.type"] = "yarn"
    (found,) = gguf_encodings(header, gguf_config(header))
    own = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    raw = {"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    raw |= {"max_position_embeddings": 163840, "hidden_size": 7168, "num_attention_heads": 128}
    (stated,) = read_encodings(
        {**raw, "rope_scaling": {**own, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 1e4}
    )
    for name in ("scheme", "head_dim", "heads", "window", "original", "notes"):
        assert getattr(found, name) == getattr(stated, name)
