"""A rotation written as transformers writes it: the `rope_parameters` of a configuration.

What `ropes` reads, the other way round. transformers 5 computes the very frequencies from them, or
there is no name for them there.

Rotations as transformers writes them: the `rope_parameters` of a configuration, read.

`rope_type` names the frequencies, `rope_theta` is the base, `partial_rotary_factor` the share of a
head that turns; where layers differ, each type of layer has a dictionary of its own. `ropes` says
what transformers (5.17 to 5.22) computes from them, whatever they were meant to say;
`rope_parameters` writes them. How pairs lie in a head is the model's own and stands in no
configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from longitude.core.part import Frequencies
from longitude.core.validate import UserError, short, shown
from longitude.hf.faults import check
from longitude.hf.rope_fields import code_reads, is_number, stated
from longitude.parts import (
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Rope,
    Unscaled,
    Yarn,
)


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The `rope_parameters` under which transformers computes these frequencies.

    Dynamic NTK also needs `max_position_embeddings` at its original length: no key says it.
    """
    odd = rope.remap or rope.decay
    if odd:
        raise UserError(f"transformers has no name for {shown(odd)}: leave it out of rope(…).")
    scaling = _scaling(rope.frequencies) | {"rope_theta": float(rope.base)}
    if rope.fraction == 1:
        return scaling
    if "partial_rotary_factor" in scaling:
        raise UserError(
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
    raise UserError(
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


def ropes(config: Any) -> dict[str | None, Rope | None]:
    """The rotation of each type of layer of a transformers configuration, in `pairs="half"`.

    The key is None where there is one for all layers, the value None where nothing turns. Layers
    that a model leaves unturned one by one (SmolLM3, Cohere 2) don't show here.
    """
    config = _of_text(config)
    parameters = getattr(config, "rope_parameters", None)
    if getattr(config, "position_embedding_type", None) == "rotary" and not parameters:  # ESM
        return {None: Rope(float(config.rope_theta))}
    if not parameters or getattr(config, "alibi", False):
        return {None: None}
    types = _layer_types(config, parameters)
    if not types:
        return {None: _rope(config, parameters, parameters)}
    return {t: _rope(config, parameters[t], parameters) if parameters[t] else None for t in types}


def read(source: str | Path | Mapping[str, Any]) -> dict[str | None, Rope | None]:
    """The rotations of a config.json: its path, its folder, or what it holds, in the form of
    transformers 5 or 4. Raises where it leaves open what they are."""
    raw = stated(source)
    check(raw)
    return ropes(made(raw))


def layer_types(raw: Mapping[str, Any]) -> list[str]:
    """The type of each layer of what a config.json holds; none where its class names none."""
    return list(getattr(_of_text(made(raw)), "layer_types", None) or ())


def made(raw: Mapping[str, Any]) -> Any:
    """The configuration that transformers makes of what a config.json holds."""
    try:
        from transformers import AutoConfig

        return AutoConfig.for_model(**deepcopy(dict(raw)))  # which writes into what it is given
    except Exception as error:  # of many kinds, for each model checks its own entries
        raise UserError(
            f"transformers refuses a configuration of model_type {shown(raw.get('model_type'))} "
            f"({short(str(error), 120)}): correct its entries or its type."
        ) from error


def _of_text(config: Any) -> Any:
    """The part of a configuration that says how text is read: the whole, or one inside it."""
    inside = config if getattr(config, "rope_parameters", None) else config.get_text_config()
    return inside if getattr(inside, "rope_parameters", None) else config


def _layer_types(config: Any, parameters: Mapping[str, Any]) -> list[str]:
    """The types of layers that have a dictionary of their own, as transformers finds them."""
    labels = getattr(config, "_rope_type_labels", None) or getattr(config, "layer_types", None)
    return [key for key in parameters if key in (labels or ())]


def _rope(config: Any, own: Mapping[str, Any], whole: Mapping[str, Any]) -> Rope | None:
    """The rotation of one dictionary; `whole` is the one it lies in, or itself."""
    sections = own.get("mrope_section")
    if sections or code_reads(type(config), "mrope_section"):
        raise UserError(
            f"a rope(…) turns by one position, but this checkpoint by several at once (M-RoPE, "
            f"sections {shown(sections) if sections else 'in its code'}): use a model of text."
        )
    fraction = _fraction(config, own)
    if not fraction:
        return None
    return Rope(_number(own, "rope_theta"), fraction, "half", _frequencies(config, own, whole))


def _fraction(config: Any, own: Mapping[str, Any]) -> float:
    """The share of a head that turns: a proportional rotation has its share inside."""
    share = _maybe(own, "partial_rotary_factor")
    blind = _kind(own) == "default" and not code_reads(type(config), "partial_rotary_factor")
    share = 1.0 if share is None or blind or _kind(own) == "proportional" else share
    still, turned = (getattr(config, f"qk_{n}_head_dim", None) for n in ("nope", "rope"))
    if still is None or turned is None:
        return share
    # multi-head latent attention turns a piece of each head, which may be called the head
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _share(int(head * share), still + turned) if turned else 0.0


def _share(dim: int, head: int) -> float:
    """The smallest share of which a head's size, rounded down, makes these dimensions."""
    share = dim / head
    return share if int(head * share) == dim else math.nextafter(share, 1)


def _kind(own: Mapping[str, Any]) -> str:
    return str(own.get("rope_type") or own.get("type") or "default")


def _need(own: Mapping[str, Any], key: str) -> Any:
    if own.get(key) is None:
        raise UserError(
            f"rope_parameters of type {_kind(own)!r} need {key}, but got only "
            f"{shown(sorted(own))}: add it."
        )
    return own[key]


def _frequencies(config: Any, own: Mapping[str, Any], whole: Mapping[str, Any]) -> Frequencies:
    match _kind(own):
        case "default":
            return Unscaled()
        case "linear":
            return Linear(_number(own, "factor"))
        case "dynamic" if own.get("alpha") and code_reads(type(config), "alpha"):
            # Hunyuan: a fixed stretch of the base
            return Ntk(_number(own, "alpha"))
        case "dynamic":  # `original_max_position_embeddings` plays no part in it
            return DynamicNtk(_most(config), _number(own, "factor"))
        case "proportional":
            share = _maybe(own, "partial_rotary_factor")
            return Proportional(1.0 if share is None else share, _or(own, "factor", 1))
        case "llama3":
            return _read_llama3(own, _original(config, own, whole))
        case "yarn":
            return _read_yarn(config, own, whole)
        case "longrope":
            return _read_longrope(config, own, whole)
    raise UserError(
        f"no rotation is known under rope_type {shown(_kind(own))}: "
        f"transformers has default, linear, dynamic, yarn, longrope, llama3 and proportional."
    )


def _number(own: Mapping[str, Any], key: str) -> float:
    value = _need(own, key)
    if not is_number(value):
        raise UserError(
            f"{key} of rope_parameters is a number, but got {shown(value)}: correct it."
        )
    return float(value)


def _maybe(own: Mapping[str, Any], key: str) -> float | None:
    return None if own.get(key) is None else _number(own, key)


def _or(own: Mapping[str, Any], key: str, default: float) -> float:
    """A number that is taken for left out where it is None or 0, as transformers does."""
    return _maybe(own, key) or default


def _numbers(own: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = _need(own, key)
    if not isinstance(values, list | tuple) or not all(map(is_number, values)):
        raise UserError(f"{key} of rope_parameters is a list, but got {shown(values)}: correct it.")
    return tuple(map(float, values))


def _most(config: Any) -> int:
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        raise UserError("these rope_parameters need max_position_embeddings beside them: add it.")
    return most


def _original(config: Any, own: Mapping[str, Any], whole: Mapping[str, Any]) -> int:
    """The trained length: the file's own (Phi-3), or the dictionary's, or else the maximum."""
    key = "original_max_position_embeddings"
    beside = getattr(config, key, None) if own is whole else None
    return int(beside or _maybe(own, key) or _most(config))


def _read_llama3(own: Mapping[str, Any], original: int) -> Llama3:
    factor, low, high = (
        _number(own, key) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    return Llama3(factor, original=original, low=low, high=high)


def _read_yarn(config: Any, own: Mapping[str, Any], whole: Mapping[str, Any]) -> Yarn:
    original = _original(config, own, whole)
    factor = _maybe(own, "factor")
    return Yarn(
        _most(config) / original if factor is None else factor,
        original=original,
        fast=_or(own, "beta_fast", 32),
        slow=_or(own, "beta_slow", 1),
        truncate=bool(whole.get("truncate", True)),  # transformers never looks inside a layer's own
        attention_factor=_maybe(own, "attention_factor"),
        mscale=_maybe(own, "mscale"),
        mscale_all_dim=_maybe(own, "mscale_all_dim"),
    )


def _read_longrope(config: Any, own: Mapping[str, Any], whole: Mapping[str, Any]) -> LongRope:
    original = _original(config, own, whole)
    factor = _maybe(own, "factor")
    return LongRope(
        _numbers(own, "short_factor"),
        _numbers(own, "long_factor"),
        original=original,
        factor=_most(config) / original if factor is None else factor,
        attention_factor=_longrope_scaling(own),
    )


def _longrope_scaling(own: Mapping[str, Any]) -> float | None:
    """The factor on q and on k each. Phi-3.5-MoE gives two by length, which are equal; that its
    code in transformers never takes the long frequencies is not repeated here."""
    brief, long = _maybe(own, "short_mscale"), _maybe(own, "long_mscale")
    if brief != long:
        raise UserError(
            f"longrope(…) has one attention factor for every length, but got a short_mscale of "
            f"{brief} and a long_mscale of {long}: make them equal."
        )
    return _maybe(own, "attention_factor") if brief is None else brief
