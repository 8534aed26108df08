"""Target frequencies as rope dictionaries: a named type, or one factor for each pair.

A larger base is understood everywhere ("default" with a rope_theta). Other names (linear, yarn,
llama3) do where the runtime's formula is the scheme's. Any fixed frequencies fit a longrope with
two equal lists, g_i = base^(-2i/d) / θ_i, so that it does not matter which list a runtime takes;
the factor on cosine and sine is stated beside them.
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

SERVED = ("max_sequence_length", "model_max_length")  # which vLLM and SGLang read besides


def named(target: Target) -> Entries | None:
    """The type that transformers has for these frequencies, with every entry that it reads; None
    if it has no name for them."""
    rope, frequencies = _stated(target), target.rope.frequencies
    if isinstance(frequencies, Ntk):
        rope = replace(rope, base=base_of(target), frequencies=Unscaled())
    elif isinstance(frequencies, Yarn) and frequencies.ramp == "code":  # one factor for all three
        gain = None if has_default_attention(target) else target.attention
        plain = replace(frequencies, attention_factor=gain, mscale=None, mscale_all_dim=None)
        rope = replace(rope, frequencies=plain)
    try:
        entries = dict(target.sections) | rope_parameters(rope)
    except UserError:
        return None
    return entries if target.scores == 1 else _with_scores(target, entries)


def _with_scores(target: Target, entries: Entries) -> Entries | None:
    """The mscales under which a model that multiplies its scores by the square of mscale_all_dim's
    factor goes on doing so (DeepSeek's); only yarn has them."""
    factor = entries["factor"] if entries["rope_type"] == "yarn" else 1.0
    if factor <= 1:
        return None
    gains = {"mscale": target.attention * target.scores, "mscale_all_dim": target.scores}
    entries.pop("attention_factor", None)
    return entries | {key: (gain - 1) / (0.1 * math.log(factor)) for key, gain in gains.items()}


def listed(target: Target, **more: float) -> Iterator[Entries]:
    """A longrope that is the same at every length, with `more`; none if a pair has frequency 0, or
    the model's scores are multiplied by what only yarn states."""
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
    """By name where there is one; else by a list."""
    name = named(target)
    yield from (*([name] if name else []), *listed(target))


def by_attn_factor(target: Target, *unread: str) -> Iterator[Entries]:
    """For servers that multiply YaRN's own factor by attn_factor, and read longrope's under two
    names; entries that a server does not read are left out."""
    name = named(target)
    if name is not None and name["rope_type"] != "longrope":
        entries = {key: value for key, value in name.items() if key not in unread}
        factor = {"attn_factor": target.attention / default_attention(target)}
        stated = has_default_attention(target) or "mscale" in entries
        yield entries if stated else entries | factor
    yield from listed(target, short_mscale=target.attention, long_mscale=target.attention)


def by_mscale(target: Target) -> Iterator[Entries]:
    """For runtimes that take YaRN's factor on cosine and sine from mscale alone: 1 + 0.1 m ln s."""
    name = named(target)
    if name is None or name["rope_type"] == "longrope":
        return
    if name["rope_type"] == "yarn":
        name = {k: v for k, v in name.items() if k not in ("attention_factor", "truncate")}
        if not has_default_attention(target) and name["factor"] > 1 and "mscale" not in name:
            name["mscale"] = (target.attention - 1) / (0.1 * math.log(name["factor"]))
    yield name


def equal_lengths(target: Target) -> Iterator[Entries]:
    """A longrope for runtimes that scale cosine and sine by √(ln M / ln L), from the two lengths M
    and L alone, and use L for nothing else: for a scale of 1, L is M."""
    if math.isclose(target.attention, 1, rel_tol=1e-9):
        for entries in listed(target):
            yield entries | {ORIGINAL: target.length, "factor": 1.0}


def default_attention(target: Target) -> float:
    """YaRN's 0.1 ln s + 1, and 1 for all others."""
    frequencies = target.rope.frequencies
    return magnitude(frequencies.factor) if isinstance(frequencies, Yarn) else 1.0


def has_default_attention(target: Target) -> bool:
    """Whether the factor on cosine and sine is the formula's own."""
    return math.isclose(target.attention, default_attention(target), rel_tol=1e-9)


def base_of(target: Target) -> float:
    """The base of the plain frequencies, with NTK's factor in it."""
    f = target.rope.frequencies
    return stretched(target.base, f.factor, target.dims) if isinstance(f, Ntk) else target.base


def _stated(target: Target) -> Rope:
    """The rotation with the share of a head that settings must state."""
    return target.rope if target.partial else replace(target.rope, fraction=1)


def nested(config: Mapping[str, Any], entries: Mapping[str, Any]) -> Entries:
    """Entries under the key of the text model's part of a configuration, where it has one."""
    text = text_config(config)
    inside = next((key for key in INSIDE if config.get(key) is text and text is not config), None)
    return dict(entries) if inside is None else {inside: dict(entries)}


def per_layer(model: Checkpoint, parameters: Mapping[str, Any], length: int) -> Entries:
    """Parameters of the full-attention layers, with those of the other types beside them."""
    ropes = {kind: Scheme.of(rope) for kind, rope in model.others.items() if rope}
    targets = {kind: make_target(rope, model.config, length) for kind, rope in ropes.items()}
    others = {kind: next(named_or_listed(target)) for kind, target in targets.items()}
    return {FULL: dict(parameters), **others} if model.others else dict(parameters)


def both_spellings(model: Checkpoint, parameters: Mapping[str, Any], length: int) -> Entries:
    """A config.json that states one rotation to transformers 5 and 4 alike. Version 5 prefers
    `rope_scaling` and takes all of it, so the base stands inside and beside it. Version 4 does
    without if nothing is scaled and M-RoPE has no sections there."""
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
    if model.others.get(SLIDING):  # Gemma 3's name for it in version 4
        text["rope_local_base_freq"] = by_type[SLIDING]["rope_theta"]
    # Phi-3 looks here first, llama.cpp's converter for llama3 here alone
    if ORIGINAL in text or parameters["rope_type"] == "llama3":
        text[ORIGINAL] = parameters.get(ORIGINAL, text.get(ORIGINAL))
    inside = nested(config, {})
    return dict(config) | dict.fromkeys(inside, text) if inside else text


def started(runtime: Runtime, target: Target, model: Checkpoint, entries: Entries) -> Settings:
    """The start of a server that takes a length, and entries over those of config.json as JSON."""
    overrides, (length, *_) = nested(model.config, entries), runtime.lengths
    start = runtime.start.strip().replace("{folder}", shlex.quote(model.name))
    text = f"{start} {runtime.overrides} {shlex.quote(json.dumps(overrides))}\n"
    given = {runtime.overrides: overrides, length: target.length}
    return Settings({**model.config, TOKENIZER: dict(model.tokenizer), **given}, text)


def unmultiplied(target: Target, parameters: Entries) -> int:
    """The maximum to state where a server multiplies it by the factor of type linear."""
    linear = parameters["rope_type"] == "linear"
    return math.ceil(target.length / parameters["factor"]) if linear else target.length


def yaml(entries: Mapping[str, Any]) -> str:
    """A mapping as YAML, in its own order, lists of numbers on one line where they fit. PyYAML
    writes the point that YAML wants in 1.0e-06, which JSON leaves out."""
    style = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return safe_dump(dict(entries), default_flow_style=None, **style)
