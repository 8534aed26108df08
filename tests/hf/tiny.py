"""Tiny random models of many architectures, made from their configurations: no download."""

from __future__ import annotations

from typing import Any

import torch

WINDOW = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
SLIDING = {"sliding_window": 12}
MIXED = ["sliding_attention", "full_attention"] * 2

# what each configuration needs besides the shape
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": SLIDING,
    "mixtral": {**SLIDING, **EXPERTS},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 32},
    "gemma": {},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16},
    "gemma3_text": {**SLIDING, "layer_types": MIXED, "query_pre_attn_scalar": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": EXPERTS,
    "granite": {},
    "granitemoe": EXPERTS,
    "stablelm": {},
    "starcoder2": SLIDING,
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "phi": {},
    "phi3": {},
    "gpt_neox": {},
    "cohere": {},
    "cohere2": {**SLIDING, "layer_types": MIXED},
    "gpt_oss": {**SLIDING, "layer_types": MIXED, **EXPERTS},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "exaone4": {**SLIDING, "layer_types": MIXED},
    "helium": {},
    "nemotron": {},
    "persimmon": {},
    "ministral": {**SLIDING, "layer_types": MIXED},
    "seed_oss": {},
    "ernie4_5": {},
    "arcee": {},
    "diffllama": {},
    "bitnet": {},
    "apertus": {},
    "hunyuan_v1_dense": {},
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "llama4_text": {
        **EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": 12, "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
    },
    "falcon": {"alibi": False, "new_decoder_architecture": False},
    "gptj": {"rotary_dim": 8, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": WINDOW},
    "codegen": {"rotary_dim": 8, "n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": WINDOW},
    "qwen3_next": {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim":16, "linear_value_head_dim":16},
    "moonshine": {},
    "jetmoe": {},
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group":1, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "doge": {},
    "minimax": {**EXPERTS},
    "lfm2": {},
    "vaultgemma": {**SLIDING, "layer_types": MIXED},
}  # fmt: skip


def config_of(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**SHAPE, **DECODERS.get(kind, {}), **more})


def decoder(kind: str, seed: int = 0, **more: Any) -> Any:
    """A tiny causal language model of this kind, in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind, **more)).eval()
    return model.float()
