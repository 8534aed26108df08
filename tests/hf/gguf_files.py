"""Tiny GGUF files, written as llama.cpp's converter writes a Llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(
    path: Path,
    model: Any,
    keys: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    *,
    vocabulary: bool = False,
    blocks: bool = False,
) -> Path:
    """A Llama as a GGUF file; `keys` are added to it, `extra` are further tensors. llama.cpp itself
    opens it only with a vocabulary. In blocks, its matrices are Q8_0."""
    config, arch = model.config, "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{arch}.{key}", value)
    if vocabulary:
        bytes_only = config.vocab_size == 256
        _add_bytes(writer) if bytes_only else _add_vocabulary(writer, config.vocab_size)
    for name, weight in model.state_dict().items():
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        for letter, count in heads.items():
            weight = _permuted(weight, count) if f"{letter}_proj" in name else weight
        if blocks and weight.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(weight.float().numpy(), kind)
            writer.add_tensor(_renamed(name), packed, raw_dtype=kind)
            continue
        writer.add_tensor(_renamed(name), weight.float().numpy())
    for name, values in (extra or {}).items():
        writer.add_tensor(name, np.asarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_bytes(writer: Any) -> None:
    """The vocabulary of the bundled checkpoints: a byte is its own token. llama.cpp writes a space
    as ▁ before it looks tokens up."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{byte:02X}>" if byte != 32 else "▁" for byte in range(256)])
    writer.add_token_scores([-float(n) for n in range(256)])
    writer.add_token_types([6 if byte != 32 else 1 for byte in range(256)])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def _add_vocabulary(writer: Any, size: int) -> None:
    """Three special tokens, the bytes, and words that nobody uses."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3] + [6] * 256  # unknown, control, byte
    words = range(size - len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"▁w{n}" for n in words)])
    writer.add_token_scores([-float(n) for n in range(size)])
    writer.add_token_types([*kinds, *(1 for _ in words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)


def _renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp pairs neighbours where transformers pairs halves."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()
