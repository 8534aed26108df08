"""A rotation written as transformers writes it: the `rope_parameters` of a configuration.

What `ropes` reads, the other way round. transformers 5 computes the very frequencies from them, or
there is no name for them there.
"""

from __future__ import annotations

from typing import Any

from longitude.fields import Mistake, shown
from longitude.part import Frequencies
from longitude.parts import DynamicNtk, Linear, Llama3, LongRope, Proportional, Rope, Unscaled, Yarn


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The `rope_parameters` under which transformers computes these frequencies.

    Dynamic NTK also needs `max_position_embeddings` at its original length: no key says it.
    """
    odd = rope.remap or rope.decay
    if odd:
        raise Mistake(f"transformers has no name for {shown(odd)}: leave it out of rope(…).")
    scaling = _scaling(rope.frequencies) | {"rope_theta": float(rope.base)}
    if rope.fraction == 1:
        return scaling
    if "partial_rotary_factor" in scaling:
        raise Mistake(
            f"transformers turns no share of a head proportionally, but got {shown(rope)}: "
            f"leave out its fraction."
        )
    return scaling | {"partial_rotary_factor": float(rope.fraction)}


def _scaling(frequencies: Frequencies) -> dict[str, Any]:
    match frequencies:
        case Unscaled():
            return {"rope_type": "default"}
        case Linear(factor=factor):
            return {"rope_type": "linear", "factor": float(factor)}
        case DynamicNtk(factor=factor):
            return {"rope_type": "dynamic", "factor": float(factor)}
        case Proportional(share=share, factor=factor):
            scaled = {} if factor == 1 else {"factor": float(factor)}
            return {"rope_type": "proportional", "partial_rotary_factor": float(share), **scaled}
        case Llama3():
            return _llama3(frequencies)
        case LongRope():
            return _longrope(frequencies)
        case Yarn(ramp="code"):
            return _yarn(frequencies)
    raise Mistake(
        f"transformers has no name for {shown(frequencies)}: use unscaled(), linear(…), "
        f"dynamic_ntk(…), proportional(…), longrope(…), llama3(…) or yarn(…, ramp='code')."
    )


def _llama3(f: Llama3) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": float(f.factor),
        "original_max_position_embeddings": f.original,
        "low_freq_factor": float(f.low),
        "high_freq_factor": float(f.high),
    }


def _longrope(f: LongRope) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "factor": float(f.factor),
        "original_max_position_embeddings": f.original,
        "short_factor": list(map(float, f.short)),
        "long_factor": list(map(float, f.long)),
        **_given(f, "attention_factor"),
    }


def _yarn(f: Yarn) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": float(f.factor),
        "original_max_position_embeddings": f.original,
        "beta_fast": float(f.fast),
        "beta_slow": float(f.slow),
        "truncate": f.truncate,
        **_given(f, "attention_factor", "mscale", "mscale_all_dim"),
    }


def _given(f: Frequencies, *names: str) -> dict[str, float]:
    values = {name: getattr(f, name) for name in names}
    return {name: float(value) for name, value in values.items() if value is not None}
