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

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from sys import modules
from typing import Any, TypeGuard

from longitude.core.part import Frequencies
from longitude.core.validate import MAX_FLOAT, UserError, short, shown
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

ORIGINAL = "original_max_position_embeddings"
FULL = "full_attention"  # the layers that see everything, where types of layers differ
KEYS: dict[str, set[str]] = {  # the types of transformers, and what each of them reads
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "proportional": {"factor"},
    "llama3": {"factor", ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", ORIGINAL, "short_factor", "long_factor", "attention_factor"},
    "yarn": {"factor", ORIGINAL, "beta_fast", "beta_slow", "truncate"}
    | {"attention_factor", "mscale", "mscale_all_dim"},
}
THETAS = (
    "rope_theta",
    "rotary_emb_base",
    "global_rope_theta",
    "local_rope_theta",
    "rope_local_base_freq",
)
MENTIONS = ("rope_parameters", "rope_scaling", "partial_rotary_factor", "rotary_pct", *THETAS)
INSIDE = ("text_config", "thinker_config", "language_config", "llm_config", "encoder", "decoder")


@dataclass(frozen=True)
class RopeDict:
    """One rotation: its dictionary, and the configuration around it."""

    raw: Mapping[str, Any]  # the configuration, or the part of it that is about text
    whole: Mapping[str, Any]  # its rope_parameters or rope_scaling
    own: Mapping[str, Any]  # one layer type's dictionary in it, or all of it
    where: str

    @property
    def nested(self) -> bool:
        """Whether it is one type of layer's among several."""
        return self.own is not self.whole

    @cached_property
    def kind(self) -> str:
        """The name of its frequencies, as the model's configuration will call them."""
        stated = str(self.own.get("rope_type") or self.own.get("type") or "default")
        first = (
            stated in ("su", "yarn")
            and self.model
            and code_reads(self.model, "su", "configuration")
        )
        return "longrope" if first else stated  # what Phi-3 called it first

    @property
    def share(self) -> float:
        """The share of a head that is to turn."""
        above = [self.raw.get(key) for key in ("partial_rotary_factor", "rotary_pct")]
        found = [self.own.get("partial_rotary_factor"), *above]
        return next(filter(is_number, found), 1.0)

    @property
    def most(self) -> float | None:
        """The longest input the file allows."""
        most = self.raw.get("max_position_embeddings")
        return most if is_number(most) else None

    @property
    def head(self) -> int | None:
        """The size of a head that turns as one, if the file says it."""
        names = ("head_dim", "hidden_size", "num_attention_heads")
        head, width, heads = (n if is_number(n) else 0 for n in map(self.raw.get, names))
        found = int(head or (width // heads if heads else 0))
        return None if "qk_rope_head_dim" in self.raw else found or None

    @cached_property
    def model(self) -> type | None:
        """The class of the model's configuration, if transformers has the model."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = str(self.raw.get("model_type"))
        return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None

    def number(self, key: str) -> float | None:
        """A number of the dictionary, or of the file for want of it there."""
        value = self.own.get(key, None if self.nested else self.raw.get(key))
        return value if is_number(value) else None

    def named(self, key: str, file: str = "modeling") -> bool:
        """Whether the model's own code names this key; of an unknown model, it is taken to."""
        return self.model is None or code_reads(self.model, key, file)


def read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json holds: given its path, its folder, or that already."""
    if isinstance(source, Mapping):
        return dict(source)
    file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"no configuration can be read from {shown(str(file))} ({why}): "
            f"give the config.json of a checkpoint, or its folder."
        ) from error
    if not isinstance(held, dict):
        raise UserError(
            f"a config.json holds a dictionary, but {shown(str(file))} holds {shown(held)}: "
            f"give that of a checkpoint."
        )
    return held


def rope_dicts(raw: Mapping[str, Any], prefix: str = "") -> Iterator[RopeDict]:
    """The rotations of a configuration and of the ones inside that are about text."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(key)
    whole = given if isinstance(given, Mapping) else {}
    types = [t for t, own in whole.items() if isinstance(own, Mapping)]
    if types:
        yield from (RopeDict(raw, whole, whole[t], f"{prefix}{key}.{t}") for t in types)
    elif any(raw.get(name) is not None for name in MENTIONS):
        yield RopeDict(raw, whole, whole, f"{prefix}{key}")
    for name in INSIDE:
        if isinstance(raw.get(name), Mapping):
            yield from rope_dicts(raw[name], f"{prefix}{name}.")


def main_rope_dict(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dictionary of rotary parameters; where types of layers have one each, that of the layers
    that see everything."""
    inside = [d for d in found.values() if isinstance(d, Mapping)]
    chosen = found.get(FULL) or (inside[0] if inside else None)
    return chosen if isinstance(chosen, Mapping) else found


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number, which True is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MAX_FLOAT


@lru_cache(maxsize=1024)
def code_reads(config: type, key: str, file: str = "modeling") -> bool:
    """Whether the code beside a configuration's class names a key; yes where there is none to read.

    Whether a model heeds an entry stands in no configuration, and in no list that stays true.
    """
    home = Path(getattr(modules.get(config.__module__), "__file__", None) or ".")
    code = home.parent / home.name.replace("configuration_", f"{file}_")
    if not home.name.startswith("configuration_") or not code.is_file():
        return True
    return f'"{key}"' in code.read_text(encoding="utf-8")


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
    from longitude.hf.faults import check

    raw = read_config(source)
    check(raw)
    return ropes(make_config(raw))


def layer_types(raw: Mapping[str, Any]) -> list[str]:
    """The type of each layer of what a config.json holds; none where its class names none."""
    return list(getattr(_of_text(make_config(raw)), "layer_types", None) or ())


def make_config(raw: Mapping[str, Any]) -> Any:
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
