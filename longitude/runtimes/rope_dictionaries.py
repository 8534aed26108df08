"""The two ways in which settings carry frequencies: a type with a name, or a factor for each pair.

Larger bases are known everywhere ("default" and a rope_theta). The other names (linear, yarn,
llama3) are good where a runtime's formula for them is the scheme's. Any fixed frequencies at all go
into a longrope whose two lists are the same, g_i = base^(-2i/d) / θ_i, so that it does not matter
when a runtime takes which; beside them stands the factor on cosine and sine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from longitude.core.validate import UserError, shown
from longitude.hf.rope_config import FULL, INSIDE, ORIGINAL, rope_parameters
from longitude.parts import Linear, LongRope, Ntk, Unscaled, Yarn
from longitude.parts.frequencies import magnitude, stretched
from longitude.runtimes.settings import Entries, Model
from longitude.runtimes.target import Wanted, of_text


def named(w: Wanted, config: Mapping[str, Any]) -> Entries | None:
    """The type that transformers has for these frequencies, with every entry it reads; None where
    it has no name for them."""
    frequencies = w.rope.frequencies
    plain = replace(w.rope, fraction=1)
    try:
        match frequencies:
            case Ntk(factor=factor):
                base = stretched(w.base, factor, w.dims)
                found = rope_parameters(replace(plain, base=base, frequencies=Unscaled()))
            case Yarn(ramp="code"):  # one factor says what three entries may
                gain = None if usual(w) else w.attention
                one = replace(frequencies, attention_factor=gain, mscale=None, mscale_all_dim=None)
                found = rope_parameters(replace(plain, frequencies=one))
            case _:
                found = rope_parameters(plain)
    except UserError:
        return None
    return found | share(w, config)


def either(w: Wanted, config: Mapping[str, Any]) -> Iterator[Entries]:
    """By name where there is one; else by a list, which no pair that stands still can be in."""
    name = named(w, config)
    if name is not None:
        yield name
    if all(w.inv_freq):
        yield fixed(w, config)


def by_attn_factor(w: Wanted, config: Mapping[str, Any], *unread: str) -> Iterator[Entries]:
    """For servers that multiply YaRN's own factor by attn_factor, and read longrope's under two
    names; entries that one does not read are left out."""
    found = named(w, config)
    if found is not None and found["rope_type"] != "longrope":
        kept = {key: value for key, value in found.items() if key not in unread}
        yield kept if usual(w) else kept | {"attn_factor": w.attention / usual_gain(w)}
    if all(w.inv_freq):
        yield fixed(w, config, short_mscale=w.attention, long_mscale=w.attention)


def by_mscale(w: Wanted, config: Mapping[str, Any]) -> Iterator[Entries]:
    """For runtimes that find YaRN's factor on cosine and sine in mscale alone."""
    found = named(w, config)
    if found is None or found["rope_type"] == "longrope":
        return
    if found["rope_type"] == "yarn":
        kept = {k: v for k, v in found.items() if k not in ("attention_factor", "truncate")}
        factor = found["factor"]
        own = usual(w) or factor <= 1
        found = kept if own else kept | {"mscale": (w.attention - 1) / (0.1 * math.log(factor))}
    yield found


def fixed(w: Wanted, config: Mapping[str, Any], **more: float) -> Entries:
    """A longrope that is the same at every length; `more` says what a runtime reads besides."""
    factors = list(ratios(w))
    long = LongRope(
        tuple(factors),
        tuple(factors),
        original=w.original,
        factor=max(1.0, w.target / w.original),
        attention_factor=w.attention,
    )
    found = rope_parameters(replace(w.rope, fraction=1, frequencies=long))
    return found | share(w, config) | more


def level(w: Wanted, config: Mapping[str, Any]) -> Iterator[Entries]:
    """A longrope for runtimes that scale cosine and sine by √(ln M / ln L), from the two lengths M
    and L alone, and take L for nothing else: where the scale is to be 1, L is M."""
    if math.isclose(w.attention, 1, rel_tol=1e-9):
        yield fixed(w, config) | {ORIGINAL: w.target, "factor": 1.0}


def ratios(w: Wanted) -> tuple[float, ...]:
    """How many times slower than RoPE's own frequencies each pair turns."""
    if not all(w.inv_freq):
        raise UserError(
            f"pairs that stand still have no finite factor, but {shown(w.rope)} has some: export "
            f"it for transformers, vllm or sglang."
        )
    plain = (w.base ** (-2 * i / w.dims) for i in range(w.dims // 2))
    return tuple(p / f for p, f in zip(plain, w.inv_freq, strict=True))


def usual(w: Wanted) -> bool:
    """Whether the factor on cosine and sine is the one that YaRN has by itself."""
    return math.isclose(w.attention, usual_gain(w), rel_tol=1e-9)


def usual_gain(w: Wanted) -> float:
    """0.1 ln s + 1 of YaRN, and 1 of anything else."""
    frequencies = w.rope.frequencies
    return magnitude(frequencies.factor) if isinstance(frequencies, Yarn) else 1.0


def share(w: Wanted, config: Mapping[str, Any]) -> Entries:
    """The share of a head that turns; pieces of latent attention are turned whole."""
    whole = w.rope.fraction == 1 or "qk_rope_head_dim" in of_text(config)
    return {} if whole else {"partial_rotary_factor": float(w.rope.fraction)}


def kind(w: Wanted) -> str:
    """What a runtime without lists can be told: plain, linear or yarn; or none of these."""
    match w.rope.frequencies:
        case Unscaled() | Ntk():
            return "plain"
        case Linear():
            return "linear"
        case Yarn(ramp="code", truncate=True):
            return "yarn"
    return ""


def theta(w: Wanted) -> float:
    """The base that the plain frequencies have, NTK's stretch in it."""
    f = w.rope.frequencies
    return stretched(w.base, f.factor, w.dims) if isinstance(f, Ntk) else w.base


def placed(config: Mapping[str, Any], entries: Mapping[str, Any]) -> Entries:
    """Entries of a configuration, where its part about text lies inside it: around them, the key of
    that part."""
    text = of_text(config)
    inside = next((key for key in INSIDE if config.get(key) is text and text is not config), None)
    return dict(entries) if inside is None else {inside: dict(entries)}


def layered(model: Model, parameters: Mapping[str, Any]) -> Entries:
    """Parameters of the layers that see everything, with those of the other types beside them."""
    return {FULL: dict(parameters), **model.kinds} if model.kinds else dict(parameters)


def both(model: Model, parameters: Mapping[str, Any], most: int) -> Entries:
    """A config.json that says one rotation to transformers 5 and 4 alike.

    Version 5 takes `rope_scaling` first where there is one, and the whole of it: the base stands
    inside as well as beside it. Version 4 goes without where nothing is scaled.
    """
    config, text = model.config, dict(of_text(model.config))
    for old in ("rope_scaling", "rotary_emb_base"):
        text.pop(old, None)
    new = {
        "max_position_embeddings": most,
        "rope_parameters": layered(model, parameters),
        "rope_theta": parameters["rope_theta"],
    }
    if parameters["rope_type"] != "default":
        new["rope_scaling"] = dict(parameters)
    if local := model.kinds.get("sliding_attention"):  # Gemma 3's name for it in version 4
        new["rope_local_base_freq"] = local["rope_theta"]
    if ORIGINAL in text:  # Phi-3 looks here first
        new[ORIGINAL] = parameters.get(ORIGINAL, text[ORIGINAL])
    inside = placed(config, {})
    if not inside:
        return text | new
    return dict(config) | dict.fromkeys(inside, text | new)
