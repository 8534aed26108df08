"""Tiny random models of many architectures, made from their configurations: no download.

Weights are drawn large enough for attention to be sharp and norms to have gains of their own: near
zero, a wrong rotation would change nothing that a test could see.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

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
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 8,
}  # fmt: skip
MAMBA1 = {
    "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False, "attn_layer_period": 2,
    "attn_layer_offset": 1,
}  # fmt: skip
EVERY_OTHER = {"layer_types": ["linear_attention", "full_attention"] * 2}
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
    # all experts: its two forms of linear attention round differently, and a near tie would flip
    "qwen3_next": {**SHARED, **LINEAR, "num_experts_per_tok": 4},
    "qwen3_5_text": LINEAR,  # M-RoPE, whose streams coincide in a text
    "qwen3_5_moe_text": {**SHARED, **LINEAR},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16},
    "vaultgemma": MIXED,
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": EXPERTS,
    "granite": {},
    "granite_swa": {**MIXED, "layer_rope_theta": [10000, 0, 500000, 10000]},
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
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax": EXPERTS,
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "bailing_hybrid": {**MLA, **EVERY_OTHER},
    "olmo_hybrid": LINEAR,
    "lfm2_moe": {
        **EXPERTS,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},  # attention and a state space side by side
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "rope",
    },
    "zamba2": {
        **MAMBA,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "layer_types": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "use_mem_rope": True,
        "adapter_rank": 8,
        "num_key_value_heads": 4,
    },
    # their attention has no positions
    "jamba": {**MAMBA1, **EXPERTS, "expert_layer_period": 2, "expert_layer_offset": 1},
    "zamba": {
        **MAMBA1,
        "n_mamba_heads": 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layer_types": ["linear_attention", "hybrid"] * 2,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 8,
        "layers_block_type": None,
    },
    "afmoe": {**MIXED, **SHARED, "num_dense_layers": 1},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": MLA,
    "cohere2_moe": {**MIXED, **SHARED},
    "cwm": MIXED,
    "ernie4_5_moe": {**SHARED, "moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": {**MIXED, **SHARED},
    "flex_olmo": EXPERTS,
    "glm4_moe": {**ROUTED, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": MLA,
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 32},
    "hy_v3": SHARED,
    "hyperclovax": {},
    "jais2": {},
    "laguna": {**MIXED, **SHARED},
    "longcat_flash": MLA,
    "minimax_m2": SHARED,
    "ministral3": {},
    "modernbert-decoder": SLIDING,
    "phimoe": EXPERTS,
    "solar_open": ROUTED,
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 12,
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 2,
    },
}
OLD = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": WINDOW, "rotary_dim": 8}


class Multimodal(NamedTuple):
    """A model of texts and images: its vision tower, and M-RoPE's sections of eight pairs."""

    vision: dict[str, Any]
    sections: list[int]
    order: str


TOWER = {"hidden_size": 32, "out_hidden_size": 64}
TABLE = {**TOWER, "num_position_embeddings": 64}
PLAIN, INTERLEAVED = ([2, 3, 3], "plain"), ([3, 3, 2], "interleaved")
MULTIMODAL = {
    "qwen2_vl": Multimodal({"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, *PLAIN),
    "qwen2_5_vl": Multimodal({**TOWER, "fullatt_block_indexes": [0]}, *PLAIN),
    "qwen3_vl": Multimodal(TABLE, *INTERLEAVED),
    "qwen3_5": Multimodal(TABLE, *INTERLEAVED),
}


IMAGE, START, END, VIDEO = 90, 91, 92, 93  # tokens
VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "in_channels": 3}
VISION |= {"depth": 1, "num_heads": 2, "intermediate_size": 32, "deepstack_visual_indexes": [0]}


def multimodal(kind: str, **more: Any) -> Any:
    """A tiny model of texts and images, in float32; `more` is of its text part."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    # a quarter of each of Qwen3.5's heads rotates
    sizes = {**SHAPE, **({"head_dim": 64, **LINEAR} if kind == "qwen3_5" else {}), **more}
    pairs = sizes["head_dim"] // (8 if kind == "qwen3_5" else 2)
    sections = [n * pairs // 8 for n in MULTIMODAL[kind].sections]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    tokens = {"video_token_id": VIDEO, "image_token_id": IMAGE}
    tokens |= {"vision_start_token_id": START, "vision_end_token_id": END}
    text, vision = {**sizes, "rope_parameters": rope}, {**VISION, **MULTIMODAL[kind].vision}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    return sharp(AutoModelForImageTextToText.from_config(config))


class Refusal(NamedTuple):
    """Why an architecture can't be patched, and what its refusal says."""

    entries: dict[str, Any]
    why: str
    says: str


OFF = ("attention in its own code, off transformers' interface", "can't be patched|can't patch")
MORE = (
    "it does more with queries than rotate them: schemes of other frequencies alone",
    "only schemes of other frequencies",
)
SPARSE = (
    "sparse attention, which chooses its keys itself: schemes of other frequencies alone",
    "chooses or weighs keys itself",
)
REFUSED = {
    "gptj": Refusal(OLD, *OFF),
    "codegen": Refusal(OLD, *OFF),
    "gpt_neox_japanese": Refusal({}, *OFF),
    "doge": Refusal({}, *OFF),
    "hunyuan_v1_dense": Refusal({}, *MORE),
    "nanochat": Refusal({}, *MORE),
    "deepseek_v32": Refusal(MLA, *SPARSE),
}


def config_of(kind: str, **more: Any) -> Any:
    from transformers import AutoConfig

    own = DECODERS[kind] if kind in DECODERS else REFUSED[kind].entries
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


def checkpointed(model: Any, reentrant: bool = False) -> None:
    """Recompute activations in the backward; transformers 5.23 renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


def ids(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Some tokens that are none of the special ones."""
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))
