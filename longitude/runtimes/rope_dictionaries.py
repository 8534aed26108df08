"""Target frequencies as rope dictionaries: a named type, or one factor for each pair.

Every runtime understands a larger base ("default" with a rope_theta). Other types (linear, yarn,
llama3) work where the runtime's formula is the scheme's. Any fixed frequencies can be written as a
longrope with two equal lists, g_i = base^(-2i/d) / θ_i, so that it does not matter which list a
runtime selects; the factor on cosine and sine is stated beside them.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from yaml import safe_dump

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.rope_config import FULL, INSIDE, ORIGINAL, is_number, rope_parameters
from longitude.parts import LongRope, Ntk, Rope, Unscaled, Yarn
from longitude.parts.frequencies import magnitude, stretched
from longitude.runtimes import Runtime, Settings
from longitude.runtimes.checkpoint import SLIDING, TOKENIZER, Checkpoint, Entries
from longitude.runtimes.target import LENGTHS, Target, make_target, text_config

SERVED = ("max_sequence_length", "model_max_length")  # vLLM and SGLang read these, too


def typed_dictionary(target: Target) -> Entries | None:
    """Return the rope dictionary of the type that transformers has for these frequencies, with
    every entry that it reads; None if it has no such type."""
    rope, frequencies = _stated(target), target.rope.frequencies
    if isinstance(frequencies, Ntk):
        rope = replace(rope, base=base_of(target), frequencies=Unscaled())
    elif isinstance(frequencies, Yarn) and frequencies.ramp == "code":  # one factor replaces three
        gain = None if has_default_attention(target) else target.attention
        yarn = replace(frequencies, attention_factor=gain, mscale=None, mscale_all_dim=None)
        rope = replace(rope, frequencies=yarn)
    try:
        entries = dict(target.sections) | rope_parameters(rope)
    except UserError:
        return None
    return entries if target.scores == 1 else _with_scores(target, entries)


def _with_scores(target: Target, entries: Entries) -> Entries | None:
    """Add mscales that keep the score factor of a model which multiplies scores by the square of
    mscale_all_dim's factor (DeepSeek's). None unless the type is yarn, which alone has mscales."""
    factor = entries["factor"] if entries["rope_type"] == "yarn" else 1.0
    if factor <= 1:
        return None
    gains = {"mscale": target.attention * target.scores, "mscale_all_dim": target.scores}
    entries.pop("attention_factor", None)
    return entries | {key: (gain - 1) / (0.1 * math.log(factor)) for key, gain in gains.items()}


def listed(target: Target, **more: float) -> Iterator[Entries]:
    """Yield a longrope with two equal lists and the entries `more`; nothing if a pair has frequency
    0, or if the model multiplies its scores by a factor that only yarn can state."""
    if not all(target.inv_freq) or target.scores != 1:
        return
    plain = (target.base ** (-2 * i / target.dims) for i in range(target.dims // 2))
    factors = tuple(p / f for p, f in zip(plain, target.inv_freq, strict=True))
    longrope = LongRope(
        factors,
        factors,
        original=target.original,
        factor=max(1.0, target.length / target.original),
        attention_factor=target.attention,
    )
    entries = rope_parameters(replace(_stated(target), frequencies=longrope))
    yield {**target.sections, **entries, **more}


def named_or_listed(target: Target) -> Iterator[Entries]:
    """Yield the named type, if there is one, then the list of factors."""
    name = typed_dictionary(target)
    yield from (*([name] if name else []), *listed(target))


def by_attn_factor(target: Target, *unread: str) -> Iterator[Entries]:
    """Yield dictionaries for servers that multiply YaRN's own factor by attn_factor, and read that
    of longrope as short_mscale and long_mscale; leaves out the entries `unread` by a server."""
    name = typed_dictionary(target)
    if name is not None and name["rope_type"] != "longrope":
        entries = {key: value for key, value in name.items() if key not in unread}
        factor = {"attn_factor": target.attention / default_attention(target)}
        stated = has_default_attention(target) or "mscale" in entries
        yield entries if stated else entries | factor
    yield from listed(target, short_mscale=target.attention, long_mscale=target.attention)


def by_mscale(target: Target) -> Iterator[Entries]:
    """Yield the named type with YaRN's factor on cosine and sine as mscale: 1 + 0.1 m ln s."""
    name = typed_dictionary(target)
    if name is None or name["rope_type"] == "longrope":
        return
    if name["rope_type"] == "yarn":
        name = {k: v for k, v in name.items() if k not in ("attention_factor", "truncate")}
        if not has_default_attention(target) and name["factor"] > 1 and "mscale" not in name:
            name["mscale"] = (target.attention - 1) / (0.1 * math.log(name["factor"]))
    yield name


def equal_lengths(target: Target) -> Iterator[Entries]:
    """Yield a longrope for runtimes that scale cosine and sine by √(ln M / ln L) of two lengths M
    and L alone, and use L for nothing else. For a scale of 1, L is set to M."""
    if math.isclose(target.attention, 1, rel_tol=1e-9):
        for entries in listed(target):
            yield entries | {ORIGINAL: target.length, "factor": 1.0}


def default_attention(target: Target) -> float:
    """The formula's own factor on cosine and sine: YaRN's 0.1 ln s + 1, and 1 for all others."""
    frequencies = target.rope.frequencies
    return magnitude(frequencies.factor) if isinstance(frequencies, Yarn) else 1.0


def has_default_attention(target: Target) -> bool:
    """Whether the factor on cosine and sine is the formula's own."""
    return math.isclose(target.attention, default_attention(target), rel_tol=1e-9)


def base_of(target: Target) -> float:
    """The base of the rotation, with NTK's factor applied to it."""
    f = target.rope.frequencies
    return stretched(target.base, f.factor, target.dims) if isinstance(f, Ntk) else target.base


def _stated(target: Target) -> Rope:
    """The rotation with a fraction of 1, unless settings must state the rotated share."""
    return target.rope if target.partial else replace(target.rope, fraction=1)


def nested(config: Mapping[str, Any], entries: Mapping[str, Any]) -> Entries:
    """Return entries under the key of the nested text configuration, if there is one."""
    text = text_config(config)
    inside = next((key for key in INSIDE if config.get(key) is text and text is not config), None)
    return dict(entries) if inside is None else {inside: dict(entries)}


def per_layer(model: Checkpoint, parameters: Mapping[str, Any], length: int) -> Entries:
    """Return the parameters as given, or by layer type with the other types' if types differ."""
    ropes = {kind: Scheme.of(rope) for kind, rope in model.others.items() if rope}
    targets = {kind: make_target(rope, model.config, length) for kind, rope in ropes.items()}
    others = {kind: next(named_or_listed(target)) for kind, target in targets.items()}
    return {FULL: dict(parameters), **others} if model.others else dict(parameters)


def both_spellings(model: Checkpoint, parameters: Mapping[str, Any], length: int) -> Entries:
    """Return a config.json that states the same rotation to transformers 5 and 4. Version 5 prefers
    `rope_scaling` and reads nothing else, so the base is both inside and beside it. Version 4 needs
    no `rope_scaling` if nothing is scaled and there are no M-RoPE sections."""
    config, text = model.config, dict(text_config(model.config))
    for old in ("rope_scaling", "rotary_emb_base"):
        text.pop(old, None)
    text |= {key: length for key in (*LENGTHS, *SERVED) if is_number(text.get(key))}
    text |= {
        "max_position_embeddings": length,
        "rope_parameters": (by_type := per_layer(model, parameters, length)),
        "rope_theta": parameters["rope_theta"],
    }
    if parameters["rope_type"] != "default" or "mrope_section" in parameters:
        text["rope_scaling"] = dict(parameters)
    if model.others.get(SLIDING):  # version 4's key for Gemma 3
        text["rope_local_base_freq"] = by_type[SLIDING]["rope_theta"]
    # Phi-3 reads this first; llama.cpp's converter reads only this for llama3
    if ORIGINAL in text or parameters["rope_type"] == "llama3":
        text[ORIGINAL] = parameters.get(ORIGINAL, text.get(ORIGINAL))
    inside = nested(config, {})
    return dict(config) | dict.fromkeys(inside, text) if inside else text


def started(runtime: Runtime, target: Target, model: Checkpoint, entries: Entries) -> Settings:
    """Return settings that start a server with a length and JSON overrides of config.json."""
    overrides, (length, *_) = nested(model.config, entries), runtime.lengths
    start = runtime.start.strip().replace("{folder}", shlex.quote(model.name))
    text = f"{start} {runtime.overrides} {shlex.quote(json.dumps(overrides))}\n"
    options = {runtime.overrides: overrides, length: target.length}
    return Settings({**model.config, TOKENIZER: dict(model.tokenizer), **options}, text)


def unmultiplied(target: Target, parameters: Entries) -> int:
    """The maximum to state for servers that multiply it by the factor of type linear."""
    linear = parameters["rope_type"] == "linear"
    return math.ceil(target.length / parameters["factor"]) if linear else target.length


def yaml(entries: Mapping[str, Any]) -> str:
    """Write a mapping as YAML, in its own order, with lists of numbers on one line if they fit.
    PyYAML writes 1.0e-06 with the decimal point that YAML requires and JSON omits."""
    style = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return safe_dump(dict(entries), default_flow_style=None, **style)
