"""Tiny random models of many architectures, made from their configurations: no download.

Weights are drawn large enough for attention to be sharp and norms to have gains of their own: near
zero, a wrong rotation would change nothing that a test could see.
"""

from __future__ import annotations

from functools import cache
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
SHARED = {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
MLA = {
    **ROUTED, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
SLIDING = {"sliding_window": 12}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}

# what each configuration needs besides the shape
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": SLIDING,
    "mixtral": {**SLIDING, **EXPERTS},
    "ministral": MIXED,
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": SHARED,
    "qwen3_moe": SHARED,
    "qwen3_next": {**SHARED, **LINEAR},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "vaultgemma": MIXED,
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
    "cohere2": MIXED,
    "gpt_oss": {**MIXED, **EXPERTS},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "exaone4": MIXED,
    "helium": {},
    "nemotron": {},
    "persimmon": {},
    "seed_oss": {},
    "ernie4_5": {},
    "arcee": {},
    "diffllama": {},
    "bitnet": {},
    "apertus": {},
    "jetmoe": {"kv_channels": 16},
    "dots1": ROUTED,
    "lfm2": {},
    "minimax": EXPERTS,
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 12,
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
    },
}
OLD = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": WINDOW, "rotary_dim": 8}
REFUSED: dict[str, dict[str, Any]] = {  # which of them can't be patched
    "gptj": OLD,
    "codegen": OLD,
    "doge": {},
    "hunyuan_v1_dense": {},
}


def config_of(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig

    own = {**DECODERS, **REFUSED}[kind]
    return AutoConfig.for_model(kind, **{**SHAPE, **own, **more})


def decoder(kind: str, seed: int = 0, **more: Any) -> Any:
    """A tiny causal language model of this kind, in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = config_of(kind, **more)
    model = sharp(AutoModelForCausalLM.from_config(config, **capped(config)))
    model.generation_config.eos_token_id = None
    return model


@cache
def shared(kind: str) -> Any:
    """The model of `decoder(kind)`, built once per session: patch it, but change nothing else."""
    return decoder(kind)


def capped(config: Any) -> dict[str, Any]:
    """Eager attention where logits are soft-capped: transformers' SDPA leaves the cap out."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if cap else {}


def sharp(model: Any) -> Any:
    """The same model, in float32, with weights that matter."""
    model = model.eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and name.endswith("norm.weight"):
                p.mul_(1 + 0.3 * torch.randn_like(p))
            elif p.dim() >= 2 and "embed" not in name and "lm_head" not in name:
                p.mul_(4)
    return model


def ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Some tokens that are none of the special ones."""
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))
