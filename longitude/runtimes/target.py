"""What a scheme requires of a runtime: rotary frequencies, the factor on cosine and sine, a length.

Whatever a runtime calls its settings, its own code must compute these numbers. There are no such
numbers for frequencies that depend on the length of a call, nor for remaps, biases or scales: these
are refused, and the error names the nearest scheme that has them.

`required` names what a runtime must support beyond that. Fixed frequencies are a base, linear,
yarn, llama3 or a list of factors (longrope in config.json, `rope_freqs` in a GGUF file), which
every runtime has. Of those that depend on the length only dynamic NTK has settings, and only in
transformers. Longrope counts as fixed, although servers choose one of its lists once. No runtime
has settings for remaps, logn or ALiBi's slopes. Dual chunk attention is left out as well: vLLM and
SGLang have it for Qwen's architectures only, and a scheme does not say which model it is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from longitude import parts
from longitude.core.part import Frequencies, by_rows
from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.encoding_config import head_dim
from longitude.hf.rope_config import (
    FULL,
    INSIDE,
    ORIGINAL,
    RopeDict,
    is_number,
    main_rope_dict,
    make_config,
    sections_of,
)
from longitude.parts.frequencies import magnitude
from longitude.runtimes import recommended

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
NO_ROTATION = 1e30  # a factor so large that no position rotates a pair
LONGER_TABLES = (parts.Hierarchical, parts.LearnedTiled, parts.LearnedInterpolated)


@dataclass(frozen=True)
class Target:
    """The numbers of one rotation at the length to serve."""

    inv_freq: tuple[float, ...]
    attention: float  # factor on cosine and on sine each: transformers' attention_scaling
    original: int  # positions the model was trained on
    length: int  # positions to serve
    base: float
    rope: parts.Rope
    dims: int  # rotated dimensions of a head
    partial: bool = False  # whether settings must state the rotated share of a head
    sections: Mapping[str, Any] = field(default_factory=dict)  # further rope entries to keep
    scores: float = 1.0  # its square multiplies the model's scores (mscale_all_dim)

    def under(self, rope: parts.Rope) -> Target:
        """Return the same model and length under another rotation."""
        inv = rope.inv_freq(self.dims, self.length)
        gain = math.sqrt(rope.frequencies.gain(self.length))
        return replace(self, rope=rope, inv_freq=tuple(inv.tolist()), attention=gain)


def make_target(scheme: Scheme | Layers, config: Mapping[str, Any], length: int) -> Target:
    """Return the numbers of a scheme on the model of this config.json, at a length. Raises for a
    scheme that is more than one rotation of fixed frequencies, and names the nearest."""
    distinct = {*scheme.schemes}
    if len(distinct) > 1:
        raise UserError(
            f"settings give every layer one rotation, but the layers of {shown(scheme)} differ: "
            f"export one scheme for all layers."
        )
    single, text = distinct.pop(), text_config(config)
    rope = single.rotary
    if rope is None:
        # schemes without rotation that settings can express: see `unrotated`
        why = f"describe a rotation, but {shown(single)} has none: export a scheme with rope(…)."
        for part in single.scale:
            if isinstance(part, parts.Drope) and part.length is None:
                why = f"have one factor for all queries, but {part} has each query's own: the "
                why += f"nearest scheme they can express is {replace(part, length=length)}."
            elif isinstance(part, parts.Drope):
                why = f"scale the rotated share of a head, but {part} scales all of it: the "
                why += "nearest scheme they can express is nope()."
        raise UserError(f"settings of a runtime {why}")
    fixed = _is_fixed(rope.frequencies) or isinstance(rope.frequencies, parts.LongRope)
    windows = [m for m in single.mask if m not in (parts.Causal(), *own_windows(config))]
    others = [rope.remap, rope.decay, single.embed, *single.bias, *single.scale, *windows]
    if unsupported := next(filter(None, [*others, None if fixed else rope.frequencies]), None):
        raise UserError(
            f"settings of a runtime describe fixed frequencies only, but got {shown(unsupported)}: "
            f"the nearest scheme they can express is {nearest(single, config, length)}."
        )
    dims, original = rope.dim(head_size(config)), trained_length(config, rope.frequencies)
    partial = rope.fraction != 1 and "qk_rope_head_dim" not in text
    sizes = (original, length, float(rope.base), rope, dims, partial)
    return Target((), 1.0, *sizes, sections_of(text), score_factor(text)).under(rope)


def score_factor(text: Mapping[str, Any]) -> float:
    """Return the factor of mscale_all_dim if the model's own code reads it, or 1. DeepSeek's code
    multiplies scores by its square, in addition to the rotation."""
    own = main_rope_dict(text.get("rope_scaling") or text.get("rope_parameters"))
    factor, bottom = own.get("factor"), own.get("mscale_all_dim")
    read = RopeDict(text, own, own, "").named("mscale_all_dim")
    return magnitude(factor, bottom) if read and is_number(factor) and is_number(bottom) else 1.0


def unrotated(
    scheme: Scheme | Layers, own: Scheme | None, config: Mapping[str, Any], length: int
) -> Scheme | None:
    """Express NoPE and DroPE in settings that can't leave out a rotation: as a list of factors so
    large that cosines are 1 in float32, and sines too small to change a number. DroPE's β is the
    square of the factor on cosine and sine, if it is one number for all queries and the rotation
    spans the head. Return None for any other scheme."""
    if isinstance(scheme, Layers) or own is None or own.rotary is None or scheme.rotary:
        return None
    beta, rest = 1.0, scheme
    match scheme.scale:
        case (parts.Drope() as drope,):
            beta, rest = drope.beta(length), replace(scheme, scale=())
            if beta != 1 and (drope.length is None or own.rotary.fraction != 1):
                return None
    if replace(rest, rotary=own.rotary) != own:
        return None
    rope, original = own.rotary, trained_length(config, own.rotary.frequencies)
    factors = (NO_ROTATION,) * (rope.dim(head_size(config)) // 2)
    scale = {"factor": max(1.0, length / original), "attention_factor": math.sqrt(beta)}
    frequencies = parts.LongRope(factors, factors, original=original, **scale)
    return replace(own, rotary=replace(rope, frequencies=frequencies))


def nearest(scheme: Scheme, config: Mapping[str, Any], length: int) -> Scheme:
    """The nearest scheme with settings: frequencies fixed at `length`, or YaRN for other parts."""
    rope = scheme.rotary or parts.Rope()
    frequencies, original = rope.frequencies, trained_length(config, rope.frequencies)
    if rope.remap or rope.decay or scheme.bias or scheme.scale or scheme.embed:
        longer = length > original
        fixed = parts.Yarn(length / original, original=original) if longer else parts.Unscaled()
    else:
        match frequencies:
            case parts.DynamicNtk(original=start, factor=factor):
                fixed = parts.Ntk(factor * max(length, start) / start - (factor - 1))
            case parts.DynamicLinear(original=start):
                fixed = parts.Linear(max(1.0, length / start))
            case parts.DynamicYarn() | parts.Stepped():
                fixed = frequencies.at(length)
            case _:
                fixed = frequencies
    return Scheme.of(replace(rope, frequencies=fixed, remap=None, decay=None))


def _is_fixed(frequencies: Frequencies) -> bool:
    return not frequencies.by_length and not by_rows(frequencies)


def supporting(scheme: Scheme | Layers, own: Scheme | Layers) -> tuple[str, ...]:
    """Return the runtimes, of those that `extend` recommends for, whose own settings can serve a
    model of scheme `own` under another scheme. Both schemes must be complete."""
    needs, count = required(scheme, own), math.lcm(len(scheme), len(own))
    changed = [own.layer(n) for n in range(count) if scheme.layer(n) != own.layer(n)]
    layers = {"all", "full", "one"}
    if changed and len({layer.rotary for layer in own.schemes}) > 1:  # layer types differ
        layers = {"all"} if any(len(layer.mask) > 1 for layer in changed) else {"all", "full"}
    suitable = [r for r in recommended() if needs is not None and needs <= r.supports]
    return tuple(r.name for r in suitable if r.layers in layers)


def required(scheme: Scheme | Layers, own: Scheme | Layers) -> frozenset[str] | None:
    """Return what a runtime must support to serve a model of scheme `own` under another: any of
    "fixed", "proportional", "dynamic_ntk", "learned_table"; None if no runtime has settings."""
    count = math.lcm(len(scheme), len(own))
    changes = {(own.layer(i), scheme.layer(i)) for i in range(count)}
    if len({before for before, _ in changes}) < len(changes):
        return None  # settings are per layer type: equal layers can't get different ones
    needs = {_required(after, before) for before, after in changes if after != before}
    return None if None in needs else frozenset(filter(None, needs))


def _required(scheme: Scheme, own: Scheme) -> str | None:
    if replace(scheme, embed=own.embed) == own:
        longer = isinstance(scheme.embed, LONGER_TABLES) and isinstance(own.embed, parts.Learned)
        return "learned_table" if longer else None
    rope, before = scheme.rotary, own.rotary
    if rope is None or before is None or replace(scheme, rotary=before) != own:
        return None
    if replace(rope, base=before.base, frequencies=before.frequencies) != before:
        return None
    match rope.frequencies:
        case parts.DynamicNtk():
            return "dynamic_ntk"
        case parts.LongRope() | parts.Unscaled():
            return "fixed"
        case parts.Proportional():  # pairs at frequency 0 have no finite factor
            return "proportional"
        case parts.FloorToZero() | parts.TruncatedBasis():
            return None
        case parts.Resonance(of=parts.Proportional() | parts.FloorToZero()):
            return None
    fixed = _is_fixed(rope.frequencies) and not isinstance(before.frequencies, parts.Proportional)
    return "fixed" if fixed else None


def head_size(config: Mapping[str, Any]) -> int:
    """The dimensions of a head; for multi-head latent attention, rotated plus unrotated ones."""
    text = text_config(config)
    size = head_dim(SimpleNamespace(**text))
    if size is None or size < 2:
        raise UserError(
            f"the head size is read from head_dim, or hidden_size and num_attention_heads, but the "
            f"configuration has only {shown(sorted(text))}: give a complete config.json."
        )
    return size


def with_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json completed with its class's head size and longest input, which those of
    google/gemma-3-4b-it and -12b-it leave out."""
    text = text_config(config)
    try:
        own = make_config(text)
    except UserError:  # unknown to transformers, or with faults, which are reported elsewhere
        own = None
    if not getattr(own, "rope_parameters", None):
        return dict(config)
    sizes = {"max_position_embeddings": getattr(own, "max_position_embeddings", None)}
    unset = getattr(own, "head_dim", 0) is None  # Mixtral's: transformers' own YaRN stops at this
    if unset or head_dim(SimpleNamespace(**text)) != head_dim(own):
        sizes["head_dim"] = head_dim(own)
    added = {key: size for key, size in sizes.items() if size and text.get(key) is None}
    inside = next((key for key in INSIDE if config.get(key) is text), None)
    return {**config, inside: {**text, **added}} if inside else {**config, **added}


def trained_length(config: Mapping[str, Any], frequencies: Frequencies | None = None) -> int:
    """The length a model was trained on, from its frequencies or else from its config.json."""
    text = text_config(config)
    dictionaries = (main_rope_dict(text.get(key)) for key in ("rope_parameters", "rope_scaling"))
    inside = [each.get(ORIGINAL) for each in dictionaries]
    own = getattr(frequencies, "original", None)
    stated = [own, *inside, text.get(ORIGINAL), text.get("max_position_embeddings")]
    length = next(filter(is_number, stated), None)
    if length is None:
        raise UserError(
            "the configuration has no max_position_embeddings, the length the model was trained "
            "on: add it."
        )
    return int(length)


def own_windows(config: Mapping[str, Any], kind: str | None = None) -> tuple[parts.Window, ...]:
    """The window of a model's layers, or of those of one type, if its config.json states one."""
    text = text_config(config)
    size, types = text.get("sliding_window"), text.get("layer_types") or ()
    full = kind == FULL or (kind is None and FULL in types)
    used = text.get("use_sliding_window", True) and not full
    return (parts.Window(size),) if used and isinstance(size, int) and size > 0 else ()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the text model: all of the given one, or one nested in it."""
    inside = [config[key] for key in INSIDE if isinstance(config.get(key), Mapping)]
    own = any(key in config for key in ("num_attention_heads", "n_head", "hidden_size"))
    return config if own or not inside else inside[0]
