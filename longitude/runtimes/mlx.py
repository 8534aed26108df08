"""mlx-lm: `rope_theta` and `rope_scaling` at the top of config.json; for most models nothing else.

Source: mlx_lm/models/rope_utils.py of 0.32.2. YaRN has neither `attention_factor` nor `truncate`,
and its factor on cosine and sine is mscale's: 1 + 0.1 m ln s. LongRoPE always uses the long list,
and computes its factor from two lengths, √(ln M / ln L). The context is not limited, so an export
may choose L to obtain any factor of 1 or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from longitude.hf.rope_config import ORIGINAL, RopeDict, is_number, main_rope_dict
from longitude.parts import Ntk, Unscaled
from longitude.parts.frequencies import magnitude
from longitude.runtimes import Question, Runner, Runtime, Settings, TopTokens
from longitude.runtimes.checkpoint import Checkpoint
from longitude.runtimes.effective import (
    DEFAULT_BASE,
    DoesNotStart,
    Effective,
    RopeEntries,
    rotated_dims,
)
from longitude.runtimes.rope_dictionaries import both_spellings, by_mscale, listed
from longitude.runtimes.target import Target, text_config
from longitude.runtimes.transformers import overridden

# models whose file in mlx_lm/models reads `rope_parameters` as well
READS_BOTH = frozenset(
    "exaone_moe gemma4_text glm_moe_dsa granitemoehybrid laguna lfm2 lfm2_moe mellum minimax_m3_vl "
    "ministral3 mistral4 muse_glimmer muse_spark olmo_hybrid qwen3 qwen3_5 spark2_5".split()
)
# models whose file in mlx_lm/models ignores scaling and uses the base alone
READS_NO_SCALING = frozenset(
    "Klear baichuan_m1 cohere cohere2 dbrx gemma gemma2 glm glm4 gpt_neox helium minimax "
    "llama4_text mimo_v2_flash olmo openelm phi phixtral plamo plamo2 plamo3 qwen "
    "recurrent_gemma stablelm starcoder2".split()
)
BASES = {"gemma3_text": 1e6}  # defaults of the model's file in mlx_lm/models
ROTATES_FULL_HEADS = frozenset("llama mistral qwen2 qwen3 gemma gemma2".split())
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}


def emulate(config: Mapping[str, Any], version: str | None = None) -> Effective:
    text = text_config(overridden(config, config.get("model_config") or {}, "model_config"))
    scaling, theta = text.get("rope_scaling"), text.get("rope_theta", text.get("rotary_emb_base"))
    rope_dict, model_type = text.get("rope_parameters"), str(text.get("model_type"))
    issues = ()
    if isinstance(rope_dict, Mapping) and model_type in READS_BOTH:
        scaling, theta = scaling or rope_dict, theta or main_rope_dict(rope_dict).get("rope_theta")
    elif isinstance(rope_dict, Mapping) and (not scaling or theta is None):
        issues = ("rope_parameters unread",)
    own, unread = _scaling(model_type, text, main_rope_dict(scaling))
    if text.get(ORIGINAL) is not None:  # Phi-3's file in mlx_lm/models passes it on
        own.setdefault(ORIGINAL, text[ORIGINAL])
    full = model_type in ROTATES_FULL_HEADS or own["rope_type"] == "proportional"
    dims = rotated_dims(text, 1.0 if full else RopeDict(text, own, own, "").share)
    base = float(theta) if is_number(theta) else BASES.get(model_type, DEFAULT_BASE)
    rope = RopeEntries(text, own, base, dims, (*issues, *unread))
    length = rope.max_length
    if model_type.startswith("hunyuan"):  # its file in mlx_lm/models only stretches the base
        if scaling and not {"alpha", "factor", "type"} <= main_rope_dict(scaling).keys():
            raise DoesNotStart("missing key")
        alpha = rope.number("alpha", 1.0)
        return rope.computed(length, Ntk(alpha) if alpha != 1 else Unscaled())
    match rope.kind:
        case "yarn":
            unstated = ["other original"] * (rope.optional(ORIGINAL) is None)
            rope = rope.updated(**{ORIGINAL: rope.number(ORIGINAL, 4096)})
            return yarn_by_mscale(rope, length, unstated)
        case "longrope":
            always_long = int(rope.number(ORIGINAL)) + 1
            plain = rope.updated(attention_factor=None, factor=None)
            return plain.computed(length, at=always_long, issues=["attention factor ignored"])
        case "dynamic":
            return rope.computed(length * rope.number("factor"), issues=["decode differs"])
        case "llama3":
            rope = rope.updated(**{**LLAMA3, **rope.entries})
    return rope.computed(length)


def _scaling(
    model_type: str, text: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the rope dictionary with its type, if the model's file in mlx_lm/models reads it, and
    issues. Two of these files stop without the older names of entries."""
    if model_type == "phi3" and own and not {"type", "long_factor"} <= own.keys():
        raise DoesNotStart("missing key")
    if model_type == "gpt_neox" and not {"rotary_emb_base", "rotary_pct"} <= text.keys():
        raise DoesNotStart("missing key")
    kind = own.get("type") or own.get("rope_type") or "default"  # in this order
    if model_type in READS_NO_SCALING and kind != "default":
        return {"rope_type": "default"}, ["scaling unread"]
    return {**own, "rope_type": kind}, []


def yarn_by_mscale(rope: RopeEntries, length: int, issues: list[str]) -> Effective:
    """Compute YaRN as runtimes that read only the mscales, and round the ramp's ends."""
    factor = rope.number("factor")
    top, bottom = rope.number("mscale", 1.0), rope.number("mscale_all_dim", 0.0)
    gain = magnitude(factor, top) / magnitude(factor, bottom)
    issues = rope.ignoring("attention_factor", "truncate") + issues
    return rope.updated(truncate=None).computed(length, attention=gain, issues=issues)


def write(target: Target, model: Checkpoint, version: str) -> Iterator[Settings]:
    """Yield config.json with a named rope type, or with a list of factors."""
    parameters = list(by_mscale(target))
    if target.attention >= 1:
        for entries in listed(target):
            del entries["attention_factor"], entries["factor"]
            parameters.append(entries | {ORIGINAL: target.length ** (1 / target.attention**2)})
    for rope_dict in parameters:
        config = both_spellings(model, rope_dict, target.length)
        if config.get("model_type") == "phi3" and "rope_scaling" in config:
            config["rope_scaling"]["type"] = rope_dict["rope_type"]
        if "rotary_emb_base" in model.config:
            config["rotary_emb_base"] = rope_dict["rope_theta"]
        yield Settings(config, config=config)


def top_tokens(question: Question) -> TopTokens:
    mx, utils = import_module("mlx.core"), import_module("mlx_lm.utils")
    model, _ = utils.load_model(Path(question["path"]))
    model.set_dtype(mx.float32)
    last = mx.array([length - 1 for length in question["lengths"]])
    logits = model(mx.array([question["ids"]]))[0][last]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    order = mx.argsort(-logprobs, axis=-1)[:, : question["top"]]
    best = mx.take_along_axis(logprobs, order, axis=-1)
    rows = zip(order.tolist(), best.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


RUNTIME = Runtime(
    name="mlx",
    title="mlx-lm",
    versions=("0.32.2",),
    emulate=emulate,
    write=write,
    rank=7,
    start="mlx_lm.server --model {folder}\n",
    file="mlx.sh",
    writes="folder",
    advice="vllm",
    lints=("config.json",),
    overrides="model_config",
    runner=Runner("mlx_lm", "mlx[cpu] mlx-lm", top_tokens),
)
