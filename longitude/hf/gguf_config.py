"""A configuration that transformers made from a GGUF file, mended to say what the file says.

transformers reads the weights of a GGUF file, and of its rotation the base alone, for some
architectures not even that: the scaling (`rope.scaling.*`, and the tensors `rope_freqs`,
`rope_factors_long` and `rope_factors_short`), the share of a head that turns and most sliding
windows are dropped without a word. Keys: llama.cpp, src/llama-arch.cpp.

llama.cpp multiplies YaRN's own 0.1 ln s + 1 by `attn_factor`; transformers' `attention_factor` is
the product. Without YaRN both mean the whole factor. Llama 3's scaling is kept as one divisor for
each frequency, 1/g = (1 - t)/s + t with t = (L/λ - 1)/(4 - 1) cut off to [0, 1], λ the wavelength:
s is the largest, and any divisor in between gives L.

Which position encoding the header of a GGUF file says: its architecture's, or its keys'.

llama.cpp turns nothing in a few architectures (src/llama-model.cpp, llama_model_rope_type); ALiBi's
and T5's have keys of their own. All others turn, scaled as the file's keys and tensors say, in the
words of a config.json (loading/mend.py).
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
from longitude.parts import T5, Alibi, Bidirectional, Learned

LOW, HIGH = 1.0, 4.0  # Llama 3's bounds, in turns
SAID = {
    *("type", "factor", "original_context_length", "attn_factor", "finetuned"),
    *("yarn_beta_fast", "yarn_beta_slow"),
}
Entries = dict[str, Any]


def fix_config(config: Any, header: Header) -> None:
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
    raise UserError(
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


TABLES = {"gpt2": False, "starcoder": False, "bert": True, "roberta-bert": True}  # both ways?
STILL = ("mamba", "mamba2", "jamba", "rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2", "nemotron_h")


def has_rotary(header: Header) -> bool:
    """Whether a file's model turns queries and keys."""
    return _still(header) is None


def gguf_encodings(header: Header, config: Mapping[str, Any] | None) -> tuple[Encoding, ...]:
    """The encoding of a GGUF file; `config` is its rotation as a config.json, if it turns."""
    still = _still(header)
    if still is not None or config is None:
        return (still or Encoding("unknown", where="no key of the file"),)
    return tuple(
        replace(
            each,
            where=f"{header.architecture}.rope.* of the file",
            window_from=f"{header.architecture}.context_length",
        )
        for each in read_encodings(config)
    )


def _still(header: Header) -> Encoding | None:
    """The encoding of an architecture that turns nothing; None of others."""
    length, arch = header.own("context_length"), header.architecture
    heads, width = header.own("attention.head_count"), header.own("embedding_length")
    size = width // heads if isinstance(heads, int) and heads and width else None
    told = {"window": length, "window_from": f"{arch}.context_length", "head_dim": size}
    told |= {"heads": heads if isinstance(heads, int) else None}
    steep, buckets = (
        header.own("attention.max_alibi_bias"),
        header.own("attention.relative_buckets_count"),
    )
    if steep or arch == "bloom":
        scheme = Scheme.of(Alibi(steepness=float(steep or 8)))
        return Encoding("alibi", scheme=str(scheme), where=f"{arch} of the file", **told)
    if buckets:
        scheme = Scheme.of(T5(int(buckets)))
        return Encoding("t5", scheme=str(scheme), where=f"{arch} of the file", **told)
    if arch in TABLES and length:
        way = (Bidirectional(),) if TABLES[arch] else ()
        scheme = Scheme.of(Learned(int(length)), *way)
        return Encoding("learned", scheme=str(scheme), where=f"{arch} of the file", **told)
    return Encoding("none", where=f"{arch} of the file", **told) if arch in STILL else None
