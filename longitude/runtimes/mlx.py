"""mlx-lm: `rope_theta` and `rope_scaling` at the top of config.json, for most models nothing else.

mlx_lm/models/rope_utils.py of 0.32.2. YaRN has neither `attention_factor` nor `truncate`, and takes
one mscale alone; LongRoPE always takes the long list and its factor from the lengths. There is no
longest input.

mlx-lm: most of its models read the top-level `rope_theta` and `rope_scaling` alone, and it has
no flags for them.

YaRN's factor on cosine and sine is mscale's: 1 + 0.1 m ln s. Longrope's comes from two lengths,
√(ln M / ln L): there is no limit on length, so that L may be chosen to make it any factor from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from longitude.hf.rope_config import ORIGINAL, RopeDict, is_number, main_rope_dict
from longitude.parts.frequencies import magnitude
from longitude.runtimes.effective import (
    Effective,
    Read,
    computed,
    frequencies,
    longrope_attention,
    turned_dims,
)
from longitude.runtimes.rope_dictionaries import both, by_mscale, fixed
from longitude.runtimes.settings import Model, Spelling
from longitude.runtimes.target import Wanted, of_text
from longitude.runtimes.transformers import THETA, overridden

# models whose own file there looks into `rope_parameters` as well
BOTH = frozenset(
    "exaone_moe gemma4_text glm_moe_dsa granitemoehybrid laguna lfm2 lfm2_moe mellum minimax_m3_vl "
    "ministral3 mistral4 muse_glimmer muse_spark olmo_hybrid qwen3 qwen3_5 spark2_5".split()
)
THETAS = {"gemma3_text": 1e6}  # of its own file there, where config.json has none
WHOLE = frozenset("llama mistral qwen2 qwen3 gemma gemma2".split())  # which turn all of a head


def effective(config: Mapping[str, Any], version: str | None = None) -> Effective:
    """What mlx-lm computes."""
    read = _held(overridden(config, config.get("model_config") or {}, "model_config"))
    match read.kind:
        case "yarn":
            return _yarn(read)
        case "longrope":
            gain = longrope_attention(read, read.most / read.number(ORIGINAL))
            near, far = read.own.get("short_factor"), read.own.get("long_factor")
            traps = ["attention factor ignored"] + ["longrope switch"] * (near != far)
            always = read.having(short_factor=far)
            return computed(
                always, frequencies(always), attention=gain, length=read.most, traps=traps
            )
        case "dynamic":
            reach = read.most * read.number("factor")
            return computed(read, frequencies(read), length=reach, traps=["decode differs"])
        case "llama3":
            bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
            filled = read.having(**{**bounds, **read.own})
            return computed(filled, frequencies(filled), length=read.most)
    return computed(read, frequencies(read), length=read.most)


def _held(config: Mapping[str, Any]) -> Read:
    text = of_text(config)
    scaling, theta = text.get("rope_scaling"), text.get("rope_theta")
    other = text.get("rope_parameters")
    traps = []
    if isinstance(other, Mapping) and text.get("model_type") in BOTH:
        scaling, theta = scaling or other, theta or main_rope_dict(other).get("rope_theta")
    elif isinstance(other, Mapping) and (not scaling or theta is None):
        traps = ["rope_parameters unread"]
    own = dict(main_rope_dict(scaling)) if isinstance(scaling, Mapping) else {}
    own["rope_type"] = own.get("type") or own.get("rope_type") or "default"  # in this order
    if text.get(ORIGINAL) is not None:  # Phi-3's own file hands it over
        own.setdefault(ORIGINAL, text[ORIGINAL])
    share = RopeDict(text, own, own, "").share
    whole = text.get("model_type") in WHOLE or own["rope_type"] == "proportional"
    dims = turned_dims(text, 1.0 if whole else share)
    base = float(theta) if is_number(theta) else THETAS.get(str(text.get("model_type")), THETA)
    return Read(text, own, base, dims, tuple(traps))


def _yarn(read: Read) -> Effective:
    factor = read.number("factor")
    top, bottom = read.number("mscale", 1.0), read.number("mscale_all_dim", 0.0)
    plain = read.having(truncate=None, **{ORIGINAL: read.number(ORIGINAL, 4096)})
    traps = ["attention factor ignored"] * (read.maybe("attention_factor") is not None)
    traps += ["truncate ignored"] * (not read.own.get("truncate", True))
    traps += ["other original"] * (read.maybe(ORIGINAL) is None)
    gain = magnitude(factor, top) / magnitude(factor, bottom)
    return computed(plain, frequencies(plain), attention=gain, length=read.most, traps=traps)


TEXT = "mlx_lm.server --model {folder}\n"


def spellings(w: Wanted, model: Model, version: str) -> Iterator[Spelling]:
    """By its name, or by a list of factors."""
    for parameters in _parameters(w, model.config):
        config = both(model, parameters, w.target)
        yield Spelling("mlx", version, config, TEXT, "mlx.sh", config)


def _parameters(w: Wanted, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from by_mscale(w, config)
    if w.attention >= 1:
        factors = fixed(w, config)
        del factors["attention_factor"], factors["factor"]
        yield factors | {ORIGINAL: w.target ** (1 / w.attention**2)}
