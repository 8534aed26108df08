"""What a scheme wants of a runtime, in numbers: how fast each pair turns, the factor on cosine and
sine, and the length that it is meant for.

Whatever names a runtime has for them, these are what its own code must come to. Frequencies that
follow the length of a call have no such numbers, nor have remaps, biases or scales: they are
refused, with the nearest scheme that has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from longitude.core.part import Frequencies, by_rows
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.rope_config import INSIDE, ORIGINAL, is_number, main_rope_dict
from longitude.parts import (
    Causal,
    DynamicLinear,
    DynamicNtk,
    DynamicYarn,
    Linear,
    LongRope,
    Ntk,
    Rope,
    Stepped,
    Unscaled,
    Yarn,
)


@dataclass(frozen=True)
class Wanted:
    """The numbers of one rotation at its target length."""

    inv_freq: tuple[float, ...]
    attention: float  # on cosine and on sine each: transformers' attention_scaling
    original: int  # positions the model was trained on
    target: int  # positions it is to be served with
    base: float
    rope: Rope
    dims: int  # of a head, that turn


def wanted(scheme: Scheme | Layers, config: Mapping[str, Any], target: int) -> Wanted:
    """The numbers of a scheme on the model of this config.json, at a target length.

    Raises for a scheme that settings can't spell, and names the nearest that they can.
    """
    rope = _rotation(scheme, config, target)
    dims = rope.dim(head_size(config))
    return Wanted(
        inv_freq=tuple(rope.frequencies.inv_freq(dims, rope.base, target).tolist()),
        attention=math.sqrt(rope.frequencies.gain(target)),
        original=trained_length(config, rope.frequencies),
        target=target,
        base=float(rope.base),
        rope=rope,
        dims=dims,
    )


def nearest(scheme: Scheme, config: Mapping[str, Any], target: int) -> Scheme:
    """The nearest scheme that settings can spell: what it would do at the target length, or YaRN in
    place of what follows no frequencies."""
    rope = scheme.rotary or Rope()
    original = trained_length(config, rope.frequencies)
    if rope.remap or rope.decay or scheme.bias or scheme.scale or scheme.embed:
        longer = target > original
        fixed = Yarn(target / original, original=original) if longer else Unscaled()
    else:
        fixed = _fixed(rope.frequencies, target)
    return Scheme.of(replace(rope, frequencies=fixed, remap=None, decay=None))


def head_size(config: Mapping[str, Any]) -> int:
    """The dimensions of a head; of multi-head latent attention, its turned and its still ones."""
    text = of_text(config)
    still, turned = (text.get(f"qk_{name}_head_dim") for name in ("nope", "rope"))
    if is_number(still) and is_number(turned):
        return int(still + turned)
    heads = text.get("num_attention_heads", text.get("n_head"))
    width = text.get("hidden_size", text.get("n_embd"))
    both = is_number(width) and is_number(heads) and heads > 0
    size = text.get("head_dim") or (width // heads if both else None)
    if not is_number(size) or size < 2:
        raise UserError(
            f"the size of a head stands in head_dim, or in hidden_size and num_attention_heads, "
            f"but the configuration has only {shown(sorted(text))}: give a whole config.json."
        )
    return int(size)


def trained_length(config: Mapping[str, Any], frequencies: Frequencies | None = None) -> int:
    """The positions a model was trained on: as its frequencies say, or else its config.json."""
    text = of_text(config)
    said = getattr(frequencies, "original", None)
    scaling = [text.get(key) for key in ("rope_parameters", "rope_scaling")]
    inside = [main_rope_dict(d).get(ORIGINAL) for d in scaling if isinstance(d, Mapping)]
    stated = [said, *inside, text.get(ORIGINAL), text.get("max_position_embeddings")]
    found = next(filter(is_number, stated), None)
    if found is None:
        raise UserError(
            "the configuration has no max_position_embeddings, the length the model was trained "
            "on: add it."
        )
    return int(found)


def of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about text: the whole, or one inside it."""
    held = [config[key] for key in INSIDE if isinstance(config.get(key), Mapping)]
    own = any(key in config for key in ("num_attention_heads", "n_head", "hidden_size"))
    return config if own or not held else held[0]


def _rotation(scheme: Scheme | Layers, config: Mapping[str, Any], target: int) -> Rope:
    """The rotation of a scheme that is nothing but one, of fixed frequencies."""
    kinds = {scheme.layer(i) for i in range(len(scheme))}
    if len(kinds) > 1:
        raise UserError(
            f"settings give every layer one rotation, but {shown(scheme)} differ: export one "
            f"scheme for all layers."
        )
    one = kinds.pop()
    if one.rotary is None:
        raise UserError(
            f"settings of a runtime say how a rotation turns, but {shown(one)} has none: export a "
            f"scheme with rope(…)."
        )
    windows = [m for m in one.mask if m != Causal()]
    strange = windows if not of_text(config).get("sliding_window") else []
    rope = one.rotary
    odd = [rope.remap, rope.decay, one.embed, *one.bias, *one.scale, *strange]
    odd += [] if _settled(rope.frequencies) else [rope.frequencies]
    found = next((p for p in odd if p), None)
    if found is None:
        return rope
    raise UserError(
        f"settings of a runtime can say fixed frequencies alone, but got {shown(found)}: the "
        f"nearest they can is {nearest(one, config, target)}."
    )


def _settled(frequencies: Frequencies) -> bool:
    """Whether a server that fixes its tables once can have them: longrope's choice of a list is
    the one thing that servers do by length."""
    fixed = not frequencies.by_length and not by_rows(frequencies)
    return fixed or isinstance(frequencies, LongRope)


def _fixed(frequencies: Frequencies, target: int) -> Frequencies:
    """What frequencies that follow the length are at this one."""
    match frequencies:
        case DynamicNtk(original=original, factor=factor):
            return Ntk(factor * max(target, original) / original - (factor - 1))
        case DynamicLinear(original=original):
            return Linear(max(1.0, target / original))
        case DynamicYarn() | Stepped():
            return frequencies.at(target)
    return frequencies
