"""The rotation of a GGUF file, as a transformers configuration and as an encoding.

transformers reads the weights of a GGUF file, but of its rotation only the base, and for some
architectures not even that: the scaling (`rope.scaling.*`, and the tensors `rope_freqs`,
`rope_factors_long` and `rope_factors_short`), the rotary fraction of a head and most sliding
windows are dropped silently. `fix_config` restores them. Keys: llama.cpp, src/llama-arch.cpp.

llama.cpp multiplies YaRN's own 0.1 ln s + 1 by `attn_factor`; transformers' `attention_factor` is
the product. Without YaRN both are the full factor. Llama 3's scaling is stored as one divisor per
frequency, 1/g = (1 - t)/s + t with t = (L/λ - 1)/(4 - 1) clipped to [0, 1], λ the wavelength: s is
the largest divisor, and any divisor in between gives L.

A few architectures have no rotation (src/llama-model.cpp, llama_model_rope_type); those with ALiBi
or T5's bias have keys of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, short
from longitude.hf.encodings import Encoding, read_encodings
from longitude.hf.gguf_reader import Header
from longitude.hf.rope_config import ORIGINAL
from longitude.parts import T5, Alibi, Bidirectional, Learned

LOW, HIGH = 1.0, 4.0  # Llama 3's bounds, in rotations over the trained length
KNOWN_SCALING = {"type", "factor", "original_context_length", "attn_factor", "finetuned"}
KNOWN_SCALING |= {"yarn_beta_fast", "yarn_beta_slow"}
LATENT = "deepseek2"
LEARNED_TABLES = {"gpt2": False, "starcoder": False, "bert": True, "roberta-bert": True}  # bidir.?
NO_ROTATION = ("mamba", "mamba2", "jamba", "rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2", "nemotron_h")
Entries = dict[str, Any]
Divisors = tuple[float, ...]


def fix_config(config: Any, header: Header) -> None:
    """Add to a configuration what transformers left unread; raise if it can't express it."""
    window = header.own("attention.sliding_window")
    if window and window != getattr(config, "sliding_window", None):
        if not hasattr(config, "sliding_window") or getattr(config, "layer_types", None):
            _refuse(header, f"has a sliding window of {window} tokens")
        config.sliding_window = window
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    base = header.own("rope.freq_base")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = header.own("rope.dimension_count", head)
    new = _frequencies(config, header, rotary_dim // 2)
    if "rope_type" not in parameters:  # one dictionary per layer type
        full = parameters.get("full_attention") or {}
        if new or base not in (None, full.get("rope_theta")):
            scaling = short(str(header.scaling()))
            _refuse(header, f"rotates its layers by base {base} and {scaling}")
        return
    if rotary_dim / head != parameters.get("partial_rotary_factor", 1.0):
        new["partial_rotary_factor"] = rotary_dim / head
    # without a base in the file, the class's default stays
    config.rope_parameters = {**parameters, **new, **({"rope_theta": base} if base else {})}
    if new.get(ORIGINAL) and hasattr(config, ORIGINAL):
        setattr(config, ORIGINAL, new[ORIGINAL])  # where Phi-3 looks first


def _refuse(header: Header, what: str) -> NoReturn:
    raise UserError(
        f"{header.path} {what}, which can't be passed to transformers from a GGUF file: load "
        "the model's own folder."
    )


def _frequencies(config: Any, header: Header, half: int) -> Entries:
    """Return the `rope_parameters` entries for the file's scaling of `half` frequencies."""
    scaling = header.scaling()
    # for DeepSeek's latent attention: a tenth of mscale and mscale_all_dim, which are equal
    latent = scaling.pop("yarn_log_multiplier", 0.0) if header.architecture == LATENT else 0.0
    for key in sorted(set(scaling) - KNOWN_SCALING):
        _refuse(header, f"scales its rotation by rope.scaling.{key} = {scaling[key]}")
    kind = scaling.get("type", "linear")  # llama.cpp's default
    original = scaling.get("original_context_length", config.max_position_embeddings)
    gain, fixed = scaling.get("attn_factor", 1.0), header.divisors.get("rope_freqs.weight", ())
    if kind == "yarn" and all(d == 1 for d in fixed):
        factor = scaling.get("factor", 1.0)
        product = {} if gain == 1 else {"attention_factor": gain * (0.1 * math.log(factor) + 1.0)}
        names = ("mscale", "mscale_all_dim") if latent else ()
        return product | {
            **dict.fromkeys(names, float(f"{10 * latent:.6g}")),
            "rope_type": "yarn",
            "factor": factor,
            ORIGINAL: original,
            "beta_fast": scaling.get("yarn_beta_fast", 32.0),
            "beta_slow": scaling.get("yarn_beta_slow", 1.0),
        }
    if kind not in ("none", "linear", "longrope"):
        _refuse(header, f"scales its rotation by {kind!r}" + " and by rope_freqs" * bool(fixed))
    factor = 1.0 if kind == "none" else scaling.get("factor", 1.0) or 1.0
    far = () if fixed else header.divisors.get("rope_factors_long.weight", ())
    near = header.divisors.get("rope_factors_short.weight", far) if far else ()
    near, far, fixed = (
        tuple(factor * d for d in each) for each in (near, far, fixed or (1.0,) * half)
    )
    if not far and gain == 1:  # one divisor per frequency: use the first type that expresses it
        if len(set(fixed)) == 1:
            return {} if fixed[0] == 1 else {"rope_type": "linear", "factor": fixed[0]}
        base = header.own("rope.freq_base", config.rope_parameters["rope_theta"])
        if llama3 := _llama3(base, fixed):
            return llama3
    return {  # this type expresses any divisors
        "rope_type": "longrope",
        "short_factor": list(near or fixed),
        "long_factor": list(far or fixed),
        ORIGINAL: original,
        "attention_factor": gain,
    }


def _llama3(base: float, divisors: Divisors) -> Entries:
    """Return the entries of Llama 3's scaling if it gives these divisors, or else {}."""
    half, factor = len(divisors), max(divisors)
    waves = [2 * math.pi * base ** (i / half) for i in range(half)]
    between = [(g, w) for g, w in zip(divisors, waves, strict=True) if 1 < g < factor]
    if not between:
        return {}
    g, wave = min(between, key=lambda pair: abs(pair[0] - math.sqrt(factor)))  # least rounding
    blend = (1 / g - 1 / factor) / (1 - 1 / factor)
    original = round(wave * (LOW + blend * (HIGH - LOW)))
    for g, wave in zip(divisors, waves, strict=True):
        blend = min(1.0, max(0.0, (original / wave - LOW) / (HIGH - LOW)))
        if not math.isclose(g * ((1 - blend) / factor + blend), 1, rel_tol=1e-4):
            return {}
    bounds = {"low_freq_factor": LOW, "high_freq_factor": HIGH}
    return {"rope_type": "llama3", "factor": factor, **bounds, ORIGINAL: original}


def has_rotary(header: Header) -> bool:
    """Whether a file's model rotates queries and keys."""
    return _without_rotation(header) is None


def gguf_encodings(header: Header, config: Mapping[str, Any] | None) -> tuple[Encoding, ...]:
    """Return a GGUF file's encoding; `config` is its rotation as a config.json, if it has one."""
    unrotated = _without_rotation(header)
    if unrotated is not None or config is None:
        return (unrotated or Encoding("unknown", where="no key of the file"),)
    arch = header.architecture
    origin = {"where": f"{arch}.rope.* of the file", "window_from": f"{arch}.context_length"}
    return tuple(replace(each, **origin) for each in read_encodings(config))


def _without_rotation(header: Header) -> Encoding | None:
    """Return the encoding of an architecture without rotation; None for others."""
    length, arch = header.own("context_length"), header.architecture
    heads, width = header.own("attention.head_count"), header.own("embedding_length")
    steepness = header.own("attention.max_alibi_bias")
    buckets = header.own("attention.relative_buckets_count")
    if steepness or arch == "bloom":
        kind, part = "alibi", Alibi(steepness=float(steepness or 8))
    elif buckets:
        kind, part = "t5", T5(int(buckets))
    elif arch in LEARNED_TABLES and length:
        kind, part = "learned", Learned(int(length))
    elif arch in NO_ROTATION:
        kind, part = "none", None
    else:
        return None
    mask = (Bidirectional(),) if kind == "learned" and LEARNED_TABLES[arch] else ()
    heads = heads if isinstance(heads, int) else None
    return Encoding(
        kind,
        scheme=str(Scheme.of(part, *mask)) if part else None,
        where=f"{arch} of the file",
        window=length,
        window_from=f"{arch}.context_length",
        head_dim=width // heads if heads and width else None,
        heads=heads,
    )
