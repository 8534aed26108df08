"""What well-known checkpoints say of their rotation, as transformers 4 wrote it and as 5 does.

Written by hand after their config.json, down to the entries that matter. LONG and SHORT stand for
Phi-3's searched factors.
"""

from typing import Any, NamedTuple

LONG = [1.0 + 0.25 * i for i in range(48)]
SHORT = [1.0 + 0.01 * i for i in range(48)]
PHI3 = "longrope(({}), ({}), original=4096, factor=32)".format(
    ", ".join(map(repr, SHORT)), ", ".join(map(repr, LONG))
)


class Real(NamedTuple):
    """One checkpoint: what both forms share, each form's own, and the rotations they stand for."""

    shared: dict[str, Any]
    four: dict[str, Any]
    five: dict[str, Any]
    ropes: dict[str | None, str]


def _sizes(model_type: str, hidden: int, heads: int, longest: int, **more: Any) -> dict[str, Any]:
    sizes = {"model_type": model_type, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "max_position_embeddings": longest, **more}


def _plain(theta: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """An unscaled rotation in both forms."""
    five = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": None}, five


def _scaled(theta: float, **scaling: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A scaled rotation in both forms; the older one says `type`."""
    kind, rest = scaling["rope_type"], {k: v for k, v in scaling.items() if k != "rope_type"}
    five = {"rope_parameters": {**scaling, "rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": {"type": kind, **rest}}, five


def _layers(**theta: float) -> dict[str, Any]:
    return {f"{t}_attention": {"rope_type": "default", "rope_theta": v} for t, v in theta.items()}


ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, ORIGINAL: 4096}
INTERLEAVED = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
PHI = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
SU = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
REAL: dict[str, Real] = {
    "Llama-3.1-8B": Real(
        _sizes("llama", 4096, 32, 131072),
        *_scaled(500000.0, **LLAMA3, **{ORIGINAL: 8192}),
        {None: "rope(base=500000, frequencies=llama3(8, original=8192))"},
    ),
    "Llama-4-Scout-17B-16E": Real(  # equal bounds: a step
        _sizes("llama4_text", 5120, 40, 10485760, head_dim=128, num_hidden_layers=4),
        *_scaled(500000.0, **LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0, ORIGINAL: 8192}),
        {None: "rope(base=500000, frequencies=llama3(16, original=8192, high=1))"},
    ),
    "Qwen2.5-7B-Instruct": Real(  # as its card says to extend it
        _sizes("qwen2", 3584, 28, 32768),
        *_scaled(1000000.0, rope_type="yarn", factor=4.0, **{ORIGINAL: 32768}),
        {None: "rope(base=1000000, frequencies=yarn(4, original=32768))"},
    ),
    "Qwen3.5, its card's YaRN": Real(  # M-RoPE, which is RoPE for a text
        _sizes("qwen3_5_text", 4096, 16, 1048576, head_dim=256, num_hidden_layers=4),
        *_scaled(1e7, rope_type="yarn", factor=4.0, **{ORIGINAL: 262144}, **INTERLEAVED),
        {None: "rope(base=10000000, fraction=0.25, frequencies=yarn(4, original=262144))"},
    ),
    "Qwen2.5-VL-7B-Instruct": Real(
        _sizes("qwen2_5_vl_text", 3584, 28, 128000),
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        {"rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        {None: "rope(base=1000000)"},
    ),
    "Phi-3-mini-128k-instruct": Real(
        _sizes("phi3", 3072, 32, 131072, **{ORIGINAL: 4096}, pad_token_id=0),
        *_scaled(10000.0, **PHI),
        {None: f"rope(frequencies={PHI3})"},
    ),
    "Phi-3-mini-128k-instruct, first": Real(  # transformers 5 wants the length inside for "su"
        _sizes("phi3", 3072, 32, 131072, **{ORIGINAL: 4096}, pad_token_id=0),
        {"rope_theta": 10000.0, "rope_scaling": {**SU, ORIGINAL: 4096}},
        {"rope_parameters": {**PHI, "rope_theta": 10000.0}},
        {None: f"rope(frequencies={PHI3})"},
    ),
    "Phi-4-mini-instruct": Real(
        _sizes(
            "phi3", 3072, 24, 131072, **{ORIGINAL: 4096}, partial_rotary_factor=0.75, pad_token_id=0
        ),
        *_scaled(10000.0, **PHI),
        {None: f"rope(fraction=0.75, frequencies={PHI3})"},
    ),
    "DeepSeek-V3": Real(
        _sizes("deepseek_v3", 7168, 128, 163840, qk_nope_head_dim=128, qk_rope_head_dim=64),
        *_scaled(10000.0, **YARN, factor=40.0, mscale=1.0, mscale_all_dim=1.0),
        {
            None: f"rope(fraction={64 / 192}, "
            f"frequencies=yarn(40, original=4096, mscale=1, mscale_all_dim=1))"
        },
    ),
    "Kimi-K2": Real(  # equal bounds again
        _sizes("deepseek_v3", 7168, 64, 131072, qk_nope_head_dim=128, qk_rope_head_dim=64),
        *_scaled(50000.0, **YARN | {"beta_fast": 1.0}, factor=32.0, mscale=1.0, mscale_all_dim=1.0),
        {
            None: f"rope(base=50000, fraction={64 / 192}, "
            f"frequencies=yarn(32, original=4096, fast=1, mscale=1, mscale_all_dim=1))"
        },
    ),
    "gemma-3-4b": Real(
        _sizes("gemma3_text", 2560, 8, 131072, head_dim=256),
        {
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {
            "rope_parameters": {
                **_layers(sliding=10000.0),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            }
        },
        {
            "sliding_attention": "rope()",
            "full_attention": "rope(base=1000000, frequencies=linear(8))",
        },
    ),
    "ModernBERT-base": Real(
        _sizes("modernbert", 768, 12, 8192),
        {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0},
        {"rope_parameters": _layers(sliding=10000.0, full=160000.0)},
        {"sliding_attention": "rope()", "full_attention": "rope(base=160000)"},
    ),
    "pythia-160m": Real(
        _sizes("gpt_neox", 768, 12, 2048),
        {"rotary_pct": 0.25, "rotary_emb_base": 10000},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000,
                "partial_rotary_factor": 0.25,
            }
        },
        {None: "rope(fraction=0.25)"},
    ),
    "stablelm-2-1_6b": Real(
        _sizes("stablelm", 2048, 32, 4096, partial_rotary_factor=0.25),
        *_plain(10000.0),
        {None: "rope(fraction=0.25)"},
    ),
    "gpt-oss-20b": Real(
        _sizes("gpt_oss", 2880, 64, 131072, head_dim=64),
        *_scaled(150000.0, **YARN, factor=32.0, truncate=False),
        {None: "rope(base=150000, frequencies=yarn(32, original=4096, truncate=False))"},
    ),
    "Hunyuan-7B": Real(
        _sizes("hunyuan_v1_dense", 4096, 32, 32768, head_dim=128),
        *_scaled(10000.0, rope_type="dynamic", factor=1.0, alpha=1000.0),
        {None: "rope(frequencies=ntk(1000))"},
    ),
    "vicuna-7b-v1.5-16k": Real(
        _sizes("llama", 4096, 32, 4096),
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {None: "rope(frequencies=linear(4))"},
    ),
    "SmolLM2-135M": Real(
        _sizes("llama", 576, 9, 8192), *_plain(100000.0), {None: "rope(base=100000)"}
    ),
    "SmolLM3-3B": Real(
        _sizes("smollm3", 2048, 16, 65536), *_plain(5000000.0), {None: "rope(base=5000000)"}
    ),
    "Mistral-7B-v0.3": Real(
        _sizes("mistral", 4096, 32, 32768), *_plain(1000000.0), {None: "rope(base=1000000)"}
    ),
    "c4ai-command-r7b": Real(
        _sizes("cohere2", 4096, 32, 8192), *_plain(50000.0), {None: "rope(base=50000)"}
    ),
}
FORMS = {
    f"{name}, version {n}": ({**real.shared, **form}, real.ropes)
    for name, real in REAL.items()
    for n, form in ((4, real.four), (5, real.five))
}
