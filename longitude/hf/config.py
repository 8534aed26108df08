"""A rotation as transformers writes it: the `rope_parameters` of a configuration, since version 5.

`rope_type` names the frequencies, `rope_theta` is the base, `partial_rotary_factor` the share of a
head that turns. How pairs lie in a head is the model's own and stands in no configuration.
"""

from __future__ import annotations

from typing import Any

from longitude.fields import Mistake, shown
from longitude.part import Frequencies
from longitude.parts import Linear, Llama3, Rope, Unscaled, Yarn


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The `rope_parameters` under which transformers computes these frequencies."""
    odd = rope.remap or rope.decay
    if odd:
        raise Mistake(f"transformers has no name for {shown(odd)}: leave it out of rope(…).")
    share = {} if rope.fraction == 1 else {"partial_rotary_factor": float(rope.fraction)}
    return _scaling(rope.frequencies) | {"rope_theta": float(rope.base)} | share


def _scaling(frequencies: Frequencies) -> dict[str, Any]:
    match frequencies:
        case Unscaled():
            return {"rope_type": "default"}
        case Linear():
            return {"rope_type": "linear", "factor": float(frequencies.factor)}
        case Llama3():
            return _llama3(frequencies)
        case Yarn(ramp="code"):
            return _yarn(frequencies)
    raise Mistake(
        f"transformers has no name for {shown(frequencies)}: "
        f"use unscaled(), linear(…), llama3(…) or yarn(…, ramp='code')."
    )


def _llama3(f: Llama3) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": float(f.factor),
        "original_max_position_embeddings": f.original,
        "low_freq_factor": float(f.low),
        "high_freq_factor": float(f.high),
    }


def _yarn(f: Yarn) -> dict[str, Any]:
    scales = {n: getattr(f, n) for n in ("attention_factor", "mscale", "mscale_all_dim")}
    given = {name: float(value) for name, value in scales.items() if value is not None}
    return {
        "rope_type": "yarn",
        "factor": float(f.factor),
        "original_max_position_embeddings": f.original,
        "beta_fast": float(f.fast),
        "beta_slow": float(f.slow),
        "truncate": f.truncate,
        **given,
    }
