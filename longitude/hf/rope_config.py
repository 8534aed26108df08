"""Rotations as transformers writes them: reads and writes `rope_parameters` of a configuration.

`rope_type` names the frequencies, `rope_theta` is the base, `partial_rotary_factor` the fraction of
a head that rotates; if layers differ, each layer type has a dictionary of its own. transformers 4
kept them in `rope_scaling` beside `rope_theta`.

`rope_dicts` reads a config.json as written, before transformers fills in defaults (faults.py checks
it). `ropes` returns what transformers (5.17 to 5.22) computes from a configuration. M-RoPE
(`mrope_section`) gives each token three positions, which are equal in a text: there it is RoPE.
`rope_parameters` writes the dictionary from which transformers computes a given rotation. The
layout of pairs in a head is fixed by the model's code; no configuration states it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeGuard

from longitude import parts
from longitude.core.part import Frequencies
from longitude.core.validate import MAX_FLOAT, UserError, short, shown
from longitude.hf.modeling_source import code_reads

ORIGINAL = "original_max_position_embeddings"
FULL = "full_attention"  # the layer type without a window, if layer types differ
SHARE = "partial_rotary_factor"
SHARES = (SHARE, "rotary_pct", "rope_pct")  # GPT-NeoX's name, and that of the first StableLM
SECTIONS = ("mrope_section", "mrope_interleaved", "interleaved")  # M-RoPE: each pair's position
TEMPERATURE = "llama_4_scaling_beta"
LISTS = ("short_factor", "long_factor")
YARN = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
# transformers' rope types: the part, and the keys that transformers reads
TYPES: dict[str, tuple[type, tuple[str, ...]]] = {
    "default": (parts.Unscaled, ()),
    "linear": (parts.Linear, ("factor",)),
    "dynamic": (parts.DynamicNtk, ("factor",)),
    "proportional": (parts.Proportional, (SHARE, "factor")),
    "llama3": (parts.Llama3, ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor")),
    "longrope": (parts.LongRope, ("factor", ORIGINAL, *LISTS, "attention_factor")),
    "yarn": (parts.Yarn, ("factor", ORIGINAL, *YARN)),
}
FIELDS = {  # the part's name for a key, where they differ
    ORIGINAL: "original",
    SHARE: "share",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "short_factor": "short",
    "long_factor": "long",
    "beta_fast": "fast",
    "beta_slow": "slow",
}
# old names (first Phi-3, Qwen2-VL) -> string in the code of classes that accept it, present name
OLDER = {"su": ("su", "longrope"), "yarn": ("su", "longrope"), "mrope": ("mrope", "default")}
THETAS = ("rope_theta", "rotary_emb_base", "global_rope_theta", "local_rope_theta")
THETAS += ("rope_local_base_freq",)
MENTIONS = ("rope_parameters", "rope_scaling", *SHARES, *THETAS)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
MAX_LAYERS = 10_000  # upper bound: configuration classes build a list of layer types
INSIDE = ("text_config", "thinker_config", "language_config", "llm_config", "encoder", "decoder")
Entries = Mapping[str, Any]


# reading a config.json as written


@dataclass(frozen=True)
class RopeDict:
    """One rotation of a config.json: its dictionary, and the configuration around it."""

    raw: Entries  # the configuration, or the part of it that is about text
    whole: Entries  # its rope_parameters or rope_scaling
    own: Entries  # one layer type's dictionary in it, or all of it
    where: str

    @property
    def nested(self) -> bool:
        """Whether the dictionary is for one layer type of several."""
        return self.own is not self.whole

    @cached_property
    def kind(self) -> str:
        """The rope type, by the name that the model's configuration class gives it."""
        return self.renamed(rope_type(self.own))

    def renamed(self, kind: str) -> str:
        """Return a rope type's present name, if the model's class accepts the old one."""
        mark, new = OLDER.get(kind, ("", kind))
        known = mark and self.model and code_reads(self.model, mark, "configuration")
        return new if known else kind

    @property
    def share(self) -> float:
        """The fraction of a head that rotates."""
        above = [self.raw.get(key) for key in SHARES]
        if is_number(rotated := self.raw.get("rotary_dim")) and self.head:  # GPT-J, MiniMax-M2
            above.append(fraction_of(int(rotated), self.head))
        stated = next(filter(is_number, [self.own.get(SHARE), *above]), None)
        return (default_share(self.model) if self.model else 1.0) if stated is None else stated

    @property
    def most(self) -> float | None:
        """The longest input the configuration allows."""
        longest = self.raw.get("max_position_embeddings")
        return longest if is_number(longest) else None

    @property
    def head(self) -> int | None:
        """The size of a head, if stated; None for latent attention, which rotates a part of it."""
        names = (("head_dim",), ("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))
        stated = (filter(is_number, map(self.raw.get, each)) for each in names)
        head, width, heads = (next(each, 0) for each in stated)
        size = int(head or (width // heads if heads else 0))
        return None if "qk_rope_head_dim" in self.raw else size or None

    @cached_property
    def model(self) -> type | None:
        """The class of the model's configuration, if transformers has the model."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = str(self.raw.get("model_type"))
        return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None

    def number(self, key: str) -> float | None:
        """Return a number of the dictionary or, unless it is nested, of the configuration."""
        value = self.own.get(key, None if self.nested else self.raw.get(key))
        return value if is_number(value) else None

    def named(self, key: str, file: str = "modeling") -> bool:
        """Whether the model's code contains this key; True for an unknown model."""
        return self.model is None or code_reads(self.model, key, file)


@cache
def default_share(model: type) -> float:
    """Return the rotated fraction if a file states none: 0.5 for GLM, 0.25 for Qwen3.5."""
    if not code_reads(model, SHARE, "configuration"):
        return 1.0
    share = main_rope_dict(getattr(model(), "rope_parameters", None)).get(SHARE)
    return share if is_number(share) else 1.0


def rope_dicts(raw: Entries, prefix: str = "") -> Iterator[RopeDict]:
    """Yield the rotations of a configuration and of the text configurations nested in it."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    value = raw.get(key)
    whole = value if isinstance(value, Mapping) else {}
    types = [t for t, inner in whole.items() if isinstance(inner, Mapping)]
    if types:
        yield from (RopeDict(raw, whole, whole[t], f"{prefix}{key}.{t}") for t in types)
    elif any(raw.get(name) is not None for name in MENTIONS):
        yield RopeDict(raw, whole, whole, f"{prefix}{key}")
    for name in INSIDE:
        if isinstance(raw.get(name), Mapping):
            yield from rope_dicts(raw[name], f"{prefix}{name}.")


def main_rope_dict(parameters: Any) -> Entries:
    """Return a rope dictionary ({} if there is none); of several, the one for full attention."""
    if not isinstance(parameters, Mapping):
        return {}
    inside = [d for d in parameters.values() if isinstance(d, Mapping)]
    chosen = parameters.get(FULL) or (inside[0] if inside else None)
    return chosen if isinstance(chosen, Mapping) else parameters


def sections_of(raw: Entries) -> dict[str, Any]:
    """Return the entries of a rope dictionary that don't affect frequencies: M-RoPE's, which choose
    each pair's position, and Ministral 3's, which scale queries past the original length."""
    entries = main_rope_dict(raw.get("rope_scaling") or raw.get("rope_parameters"))
    kept = (*SECTIONS, TEMPERATURE, ORIGINAL) if entries.get(TEMPERATURE) else SECTIONS
    return {key: entries[key] for key in kept if key in entries}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; a bool is not."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return numeric and abs(value) < MAX_FLOAT


def make_config(raw: Entries) -> Any:
    """Build transformers' configuration from the content of a config.json."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise UserError(
            f"transformers {__version__} has no model_type {shown(kind)}: `inspect` and `lint` "
            f"read its entries, all else needs a model that transformers has."
        )
    for part in (raw, *(inner for inner in raw.values() if isinstance(inner, Mapping))):
        for name in LAYERS:
            if isinstance(count := part.get(name), int) and count > MAX_LAYERS:
                raise UserError(
                    f"the configuration's {name} is {shown(count)}, but no model is as large: "
                    f"correct it."
                )
    try:
        return AutoConfig.for_model(**deepcopy(dict(raw)))  # it modifies its arguments
    except Exception as error:  # of many types: each model validates its own entries
        reason = " ".join(str(error).split()).rpartition("Error: ")[2].rstrip(".")
        raise UserError(
            f"transformers refuses a configuration of model_type {shown(raw.get('model_type'))} "
            f"({short(reason, 120)}): correct its entries or its type."
        ) from error


# writing rope_parameters


def rope_parameters(rope: parts.Rope) -> dict[str, Any]:
    """Return the `rope_parameters` from which transformers computes these frequencies.

    Dynamic NTK also needs `max_position_embeddings` at its original length: no key states it.
    """
    if rope.remap or rope.decay:
        part = shown(rope.remap or rope.decay)
        raise UserError(f"transformers has no name for {part}: leave it out of rope(…).")
    frequencies = rope.frequencies
    kind = next((kind for kind, (part, _) in TYPES.items() if type(frequencies) is part), None)
    if kind is None or getattr(frequencies, "ramp", "code") != "code":
        raise UserError(
            f"transformers has no name for {shown(frequencies)}: use unscaled(), linear(…), "
            f"dynamic_ntk(…), proportional(…), longrope(…), llama3(…) or yarn(…, ramp='code')."
        )
    written: dict[str, Any] = {"rope_type": kind}
    for key in TYPES[kind][1]:
        value = getattr(frequencies, FIELDS.get(key, key))
        if isinstance(value, tuple):
            written[key] = list(map(float, value))
        elif value is not None and (kind, key, value) != ("proportional", "factor", 1):
            written[key] = value if key in (ORIGINAL, "truncate") else float(value)
    written["rope_theta"] = float(rope.base)
    if rope.fraction == 1:
        return written
    if SHARE in written:
        raise UserError(
            f"transformers can't combine proportional(…) with fraction=…, but got {shown(rope)}: "
            f"remove the fraction."
        )
    return written | {SHARE: float(rope.fraction)}


# reading a configuration of transformers


def ropes(config: Any) -> dict[str | None, parts.Rope | None]:
    """Return the rotation of each layer type of a configuration, with `pairs="half"`.

    The key is None if all layers share a rotation, the value is None if nothing rotates. Single
    layers that a model leaves unrotated (SmolLM3, Cohere 2) are not marked here.
    """
    config = _text_config(config)
    parameters = getattr(config, "rope_parameters", None)
    if getattr(config, "position_embedding_type", None) == "rotary" and not parameters:  # ESM
        return {None: parts.Rope(float(config.rope_theta))}
    unrotated = getattr(config, "position_embedding_type", None) == "nope"  # Granite 4's hybrids
    if not parameters or unrotated or getattr(config, "alibi", False):
        return {None: None}
    labels = getattr(config, "_rope_type_labels", None) or getattr(config, "layer_types", None)
    types = [key for key in parameters if key in (labels or ())]
    if not types:
        return {None: _rope(config, parameters, parameters)}
    return {
        t: _rope(_of_layers(config, t), parameters[t], parameters) if parameters[t] else None
        for t in types
    }


def _of_layers(config: Any, layer_type: str) -> Any:
    """Return the configuration of a layer type, which may have entries of its own (Gemma 4)."""
    if getattr(config, "_heterogeneity_spec", None) is None:
        return config
    return config.per_layer_config[config.layer_types.index(layer_type)]


def read(raw: Entries) -> dict[str | None, parts.Rope | None]:
    """Return the rotations of a parsed config.json, in the format of transformers 5 or 4. Raise if
    it does not determine them."""
    from longitude.hf.faults import check

    check(raw)
    return ropes(make_config(raw))


def layer_types(raw: Entries) -> list[str]:
    """Return the type of each layer of a config.json; empty if its class has no layer types."""
    return list(getattr(_text_config(make_config(raw)), "layer_types", None) or ())


def _text_config(config: Any) -> Any:
    """Return the configuration with the text model's rotation: itself or a nested one."""
    inside = config if getattr(config, "rope_parameters", None) else config.get_text_config()
    return inside if getattr(inside, "rope_parameters", None) else config


def rope_type(own: Entries) -> str:
    """Return the rope type that a rope dictionary names."""
    return str(own.get("rope_type") or own.get("type") or "default")


def _rope(config: Any, own: Entries, whole: Entries) -> parts.Rope | None:
    """Return the rotation of one dictionary; `whole` is the dictionary around it, or itself."""
    kind = rope_type(own)
    share = _number(own, SHARE, 1.0)
    if kind == "proportional" or (kind == "default" and not code_reads(type(config), SHARE)):
        share = 1.0  # the frequencies apply it, or transformers ignores it
    fixed, rotated = (getattr(config, f"qk_{n}_head_dim", None) for n in ("nope", "rope"))
    if fixed is not None and rotated is not None:
        # multi-head latent attention rotates a part of each head; head_dim may be that part's size
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        share = fraction_of(int(head * share), fixed + rotated) if rotated else 0.0
    if not share:
        return None
    return parts.Rope(_number(own, "rope_theta"), share, "half", _frequencies(config, own, whole))


def fraction_of(dim: int, head: int) -> float:
    """Return the smallest fraction for which int(head * fraction) is `dim`."""
    share = dim / head
    return share if int(head * share) == dim else math.nextafter(share, 1)


def _frequencies(config: Any, own: Entries, whole: Entries) -> Frequencies:
    """Return a dictionary's frequencies, completed from entries elsewhere in the configuration."""
    kind, entries = rope_type(own), dict(own)
    if kind == "dynamic" and own.get("alpha") and code_reads(type(config), "alpha"):
        return parts.Ntk(_number(own, "alpha"))  # Hunyuan: a fixed stretch of the base
    longest = getattr(config, "max_position_embeddings", None)
    if kind in ("llama3", "yarn", "longrope"):
        # the trained length: the configuration's own (Phi-3), or the dictionary's, or the maximum
        beside = getattr(config, ORIGINAL, None) if own is whole else None
        entries[ORIGINAL] = beside or own.get(ORIGINAL) or _known(longest)
        entries["truncate"] = whole.get("truncate", True)  # never read from a layer type's
    if kind == "longrope":
        # Phi-3.5-MoE scales q and k by a factor that depends on length; its code in transformers
        # never uses the long frequencies, which is not reproduced here
        brief, long = (_number(own, key, None) for key in ("short_mscale", "long_mscale"))
        if brief != long:
            raise UserError(
                f"longrope(…) has one attention factor for every length, but got a short_mscale of "
                f"{brief} and a long_mscale of {long}: make them equal."
            )
        entries |= {} if brief is None else {"attention_factor": brief}
    return frequencies(entries, longest)


def frequencies(own: Entries, longest: int | None) -> Frequencies:
    """Return the frequencies of a complete rope dictionary; `longest` is the maximum length."""
    kind = rope_type(own)
    match kind:
        case "default":
            return parts.Unscaled()
        case "linear":
            return parts.Linear(_number(own, "factor"))
        case "dynamic":  # it does not use `original_max_position_embeddings`
            return parts.DynamicNtk(_known(longest), _number(own, "factor"))
        case "proportional":
            return parts.Proportional(_number(own, SHARE, 1.0), _number(own, "factor", 1) or 1)
        case "llama3":
            low, high = (_number(own, f"{end}_freq_factor") for end in ("low", "high"))
            original = int(_number(own, ORIGINAL))
            return parts.Llama3(_number(own, "factor"), original=original, low=low, high=high)
        case "longrope" | "yarn":
            original, gain = int(_number(own, ORIGINAL)), _number(own, "attention_factor", None)
            factor = _number(own, "factor", None)
            factor = _known(longest) / original if factor is None else factor
            options = {"original": original, "attention_factor": gain}
            if kind == "longrope":
                lists = (_numbers(own, key) for key in LISTS)
                return parts.LongRope(*lists, factor=factor, **options)
            return parts.Yarn(
                factor,
                fast=_number(own, "beta_fast", 32) or 32,  # 0 counts as left out
                slow=_number(own, "beta_slow", 1) or 1,
                truncate=bool(own.get("truncate", True)),
                mscale=_number(own, "mscale", None),
                mscale_all_dim=_number(own, "mscale_all_dim", None),
                **options,
            )
    raise UserError(
        f"no rotation is known under rope_type {shown(kind)}: "
        f"transformers has default, linear, dynamic, yarn, longrope, llama3 and proportional."
    )


class MissingEntryError(UserError):
    """A rope dictionary lacks an entry that its type needs, or has an unusable value for it."""


def _known(longest: int | None) -> int:
    if longest is None:
        raise MissingEntryError(
            "these rope_parameters need max_position_embeddings beside them: add it."
        )
    return longest


def _number(own: Entries, key: str, *default: Any) -> Any:
    """Return a number of a rope dictionary; if it is absent, the default, if one is given."""
    value = own.get(key)
    if value is None and default:
        return default[0]
    if not is_number(value):
        raise _wrong(own, key, "a number")
    return float(value)


def _numbers(own: Entries, key: str) -> tuple[float, ...]:
    values = own.get(key)
    if not isinstance(values, list | tuple) or not values or not all(map(is_number, values)):
        raise _wrong(own, key, "a list")
    return tuple(map(float, values))


def _wrong(own: Entries, key: str, needed: str) -> MissingEntryError:
    if own.get(key) is not None:
        message = f"{key} of rope_parameters is {needed}, but got {shown(own[key])}: correct it."
        return MissingEntryError(message)
    kind, only = rope_type(own), shown(sorted(own))
    return MissingEntryError(
        f"rope_parameters of type {kind!r} need {key}, but got only {only}: add it."
    )
