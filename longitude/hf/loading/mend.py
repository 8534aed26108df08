"""A configuration that transformers made from a GGUF file, mended to say what the file says.

transformers reads the weights of a GGUF file, and of its rotation the base alone, for some
architectures not even that: the scaling (`rope.scaling.*`, and the tensors `rope_freqs`,
`rope_factors_long` and `rope_factors_short`), the share of a head that turns and most sliding
windows are dropped without a word. Keys: llama.cpp, src/llama-arch.cpp.

llama.cpp multiplies YaRN's own 0.1 ln s + 1 by `attn_factor`; transformers' `attention_factor` is
the product. Without YaRN both mean the whole factor. Llama 3's scaling is kept as one divisor for
each frequency, 1/g = (1 - t)/s + t with t = (L/λ - 1)/(4 - 1) cut off to [0, 1], λ the wavelength:
s is the largest, and any divisor in between gives L.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from longitude.fields import Mistake, short
from longitude.hf.loading.gguf import Header

LOW, HIGH = 1.0, 4.0  # Llama 3's bounds, in turns
SAID = {
    *("type", "factor", "original_context_length", "attn_factor", "finetuned"),
    *("yarn_beta_fast", "yarn_beta_slow"),
}
Entries = dict[str, Any]


def mend(config: Any, header: Header) -> None:
    """Give a configuration what transformers left in the file; raise where there is no way to."""
    _window(config, header)
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    base = header.own("rope.freq_base")
    new = _frequencies(config, header)
    if "rope_type" not in parameters:  # one dictionary for each type of layer
        whole = parameters.get("full_attention") or {}
        if new or base not in (None, whole.get("rope_theta")):
            _refuse(header, f"turns its layers by base {base} and {short(str(header.scaling()))}")
        return
    # what a class gives by itself stays: its base where the file names none
    new |= _share(config, header) | ({"rope_theta": base} if base else {})
    config.rope_parameters = dict(parameters) | new
    original = new.get("original_max_position_embeddings")
    if original and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original  # Phi-3 looks here first


def _refuse(header: Header, what: str) -> NoReturn:
    raise Mistake(
        f"{header.path} {what}, which transformers can't be told from a GGUF file: load the "
        "model's own folder."
    )


def _window(config: Any, header: Header) -> None:
    window = header.own("attention.sliding_window")
    if not window or window == getattr(config, "sliding_window", None):
        return
    if not hasattr(config, "sliding_window") or getattr(config, "layer_types", None):
        _refuse(header, f"has a sliding window of {window} tokens")
    config.sliding_window = window


def _share(config: Any, header: Header) -> Entries:
    """The share of a head that turns, where it is not the one the configuration has."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = header.own("rope.dimension_count", head) / head
    known = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return {} if share == known else {"partial_rotary_factor": share}


def _half(config: Any, header: Header) -> int:
    """The frequencies of a head."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return header.own("rope.dimension_count", head) // 2


def _frequencies(config: Any, header: Header) -> Entries:
    """The entries of `rope_parameters` that say what the file's scaling says."""
    scaling = header.scaling()
    for odd in sorted(set(scaling) - SAID):
        _refuse(header, f"scales its rotation by rope.scaling.{odd} = {scaling[odd]}")
    kind = scaling.get("type", "linear")  # llama.cpp's own, where a file names none
    original = scaling.get("original_context_length", config.max_position_embeddings)
    gain, fixed = scaling.get("attn_factor", 1.0), header.divisors.get("rope_freqs.weight", ())
    factor = 1.0 if kind == "none" else scaling.get("factor", 1.0) or 1.0
    if kind == "yarn" and all(d == 1 for d in fixed):
        return _yarn(scaling, original)
    if kind not in ("none", "linear", "longrope"):
        _refuse(header, f"scales its rotation by {kind!r}" + " and by rope_freqs" * bool(fixed))
    far = () if fixed else header.divisors.get("rope_factors_long.weight", ())
    if far:
        near = header.divisors.get("rope_factors_short.weight", far)
        return _longrope(_times(factor, near), _times(factor, far), original, gain)
    return _fixed(config, header, _times(factor, fixed or (1.0,) * _half(config, header)))


def _times(factor: float, divisors: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(factor * d for d in divisors)


def _fixed(config: Any, header: Header, divisors: tuple[float, ...]) -> Entries:
    """One divisor for each frequency, by the first name that says them: longrope says any."""
    scaling = header.scaling()
    gain = scaling.get("attn_factor", 1.0)
    if gain == 1 and len(set(divisors)) == 1:
        factor = divisors[0]
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    named = _llama3(config, header, divisors) if gain == 1 else {}
    original = scaling.get("original_context_length", config.max_position_embeddings)
    return named or _longrope(divisors, divisors, original, gain)


def _yarn(scaling: Entries, original: int) -> Entries:
    factor = scaling.get("factor", 1.0)
    extra = scaling.get("attn_factor", 1.0)
    gain = {} if extra == 1 else {"attention_factor": extra * (0.1 * math.log(factor) + 1.0)}
    return gain | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": scaling.get("yarn_beta_fast", 32.0),
        "beta_slow": scaling.get("yarn_beta_slow", 1.0),
    }


def _longrope(
    near: tuple[float, ...], far: tuple[float, ...], original: int, gain: float
) -> Entries:
    return {
        "rope_type": "longrope",
        "short_factor": list(near),
        "long_factor": list(far),
        "original_max_position_embeddings": original,
        "attention_factor": gain,
    }


def _llama3(config: Any, header: Header, divisors: tuple[float, ...]) -> Entries:
    """Llama 3's scaling, if these are its divisors; else nothing."""
    base = header.own("rope.freq_base", config.rope_parameters["rope_theta"])
    half, factor = len(divisors), max(divisors)
    waves = [2 * math.pi * base ** (i / half) for i in range(half)]
    between = [(g, w) for g, w in zip(divisors, waves, strict=True) if 1 < g < factor]
    if not between:
        return {}
    g, wave = min(between, key=lambda pair: abs(pair[0] - math.sqrt(factor)))  # least rounded off
    blend = (1 / g - 1 / factor) / (1 - 1 / factor)
    original = round(wave * (LOW + blend * (HIGH - LOW)))
    for g, wave in zip(divisors, waves, strict=True):
        blend = min(1.0, max(0.0, (original / wave - LOW) / (HIGH - LOW)))
        if not math.isclose(g * ((1 - blend) / factor + blend), 1, rel_tol=1e-4):
            return {}
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }
