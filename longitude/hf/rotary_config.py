"""Rotations of a configuration, layer by layer: what each layer turns by, and what it sees.

`ropes` reads the frequencies of each type of layer. Here: which layers are of which type, which are
left unturned one by one (SmolLM3, Llama 4, Cohere 2, EXAONE 4), which see a window only, how pairs
lie in a head; and rotations that no `rope(…)` says: by several positions at once (M-RoPE), or by
the rows and columns of an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.hf.absolute_config import (
    HEADS,
    LAYERS,
    direction,
    entry,
    head_dim,
    of_pictures,
    stated_window,
)
from longitude.hf.modeling_source import entry_of, laid_apart, layout
from longitude.hf.rope_config import ORIGINAL, THETAS, is_number, main_rope_dict, ropes
from longitude.parts import Bidirectional, Causal, Chunked, Rope, Unscaled, Window

WITHOUT = re.compile(
    r"linear|mamba|conv|recurrent|moe|mlp"
)  # types of layers that attend to nothing
ONLY_SLIDING = re.compile(
    r"if self\.(?:sliding_window is not None|is_local_attention|is_sliding)\b.*:\n(?:.*\n){0,3}?"
    r".*apply_rotary"
)
UNLESS_FULL = re.compile(
    r"if self\.sliding_window is None or self\.is_sliding:\n(?:.*\n){0,3}?.*apply_rotary"
)
BY_PLACE = "it turns by the rows and columns of an image, or by several positions at once"
LAID_APART = "pairs lie adjacent in its weights, and are laid half a head apart as they turn"
Told = dict[str, Any]


def describe_rotary(config: Any, lines: Mapping[str, str], where: str) -> Told:
    """What is to be said of a rotation, besides that it is one."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    window, key = stated_window(config)
    told: Told = {"window": window, "window_from": key, "head_dim": head_dim(config)}
    told |= {"heads": entry(config, HEADS), "pairs": layout(lines)}
    told["where"] = "rope_parameters of the configuration" if parameters else where
    try:
        if of_pictures(config):
            return told | _unspelt(parameters or {}, BY_PLACE)
        found = _rotations(config, parameters, told["pairs"])
    except (UserError, AttributeError, TypeError, ValueError) as problem:
        return told | _unspelt(parameters or {}, str(problem))
    chief = _of_layer("full_attention", found) or next(filter(None, found.values()), None)
    if chief is None:
        return told
    told |= {"base": float(chief.base), "fraction": chief.fraction, "pairs": chief.pairs}
    scaled = chief.frequencies != Unscaled()
    original = getattr(chief.frequencies, "original", None) if scaled else None
    told["notes"] = tuple(_notes(config, chief, lines))
    told |= {"scaling": str(chief.frequencies) if scaled else None, "original": original}
    return told | _by_layers(config, "\n".join(lines.values()), found)


def _rotations(config: Any, parameters: Any, pairs: str) -> dict[str | None, Rope | None]:
    if parameters or getattr(config, "position_embedding_type", None) == "rotary":
        found = ropes(config) if hasattr(config, "get_text_config") else {None: None}
    else:
        found = {None: _bare(config)}
    return {kind: rope and replace(rope, pairs=pairs) for kind, rope in found.items()}


def _bare(config: Any) -> Rope:
    """A rotation that the code alone speaks of: of the usual base, unless an entry names one."""
    names = (*THETAS, "rotary_embedding_base", "rotary_base", "layer_rope_theta")
    base = next((v for n in names if is_number(v := entry_of(config, n))), 10000)
    whole, some = head_dim(config), entry_of(config, "rotary_dim")
    return Rope(float(base), some / whole if some and whole else 1)


def _unspelt(parameters: Mapping[str, Any], why: str) -> Told:
    """What can be said where no rope(…) turns like this."""
    own = main_rope_dict(parameters)
    base, share = own.get("rope_theta"), own.get("partial_rotary_factor")
    kind = own.get("rope_type") or own.get("type")
    sections = own.get("mrope_section")
    if sections or "M-RoPE" in why:
        named = f", sections {sections}" if sections else ""
        why = f"it turns by several positions at once (M-RoPE{named})"
    return {
        "base": float(base) if is_number(base) else None,
        "fraction": float(share) if is_number(share) else None,
        "scaling": None if kind in (None, "default", "axial") else str(kind),
        "original": own.get(ORIGINAL),
        "notes": (BY_PLACE if kind == "axial" else why,),
    }


def _notes(config: Any, rope: Rope, lines: Mapping[str, str]) -> Iterator[str]:
    """What else of positions the code does, which the scheme does not say."""
    if laid_apart(lines):
        yield LAID_APART
    own, pressed = entry_of(config, "rope_parameters"), entry_of(config, "compress_rates")
    if pressed:
        rates = " or ".join(str(rate) for rate in sorted(pressed.values()))
        yield f"keys past the sliding window are pressed together, {rates} to one (DeepSeek-V4)"
    if entry_of(config, "attn_temperature_tuning") or (own and "llama_4_scaling_beta" in own):
        yield "queries far out are scaled up with their position (Llama 4's temperature)"
    if getattr(rope.frequencies, "mscale_all_dim", None) and any(
        "yarn_apply_mscale" in text or "mscale * mscale" in text for text in lines.values()
    ):
        yield "scores are multiplied by (0.1 · mscale_all_dim · ln factor + 1)² besides"


def _by_layers(config: Any, text: str, found: Mapping[str | None, Rope | None]) -> Told:
    """The scheme of each layer that attends, put together."""
    count = entry(config, LAYERS) or 1
    types = list(entry_of(config, "layer_types") or [None] * count)[:count]
    attends = {n: t for n, t in enumerate(types) if not (t and WITHOUT.search(t))}
    way, turns = direction(text, config), _turning(config, text)

    @cache
    def scheme(kind: str | None, turned: bool) -> Scheme:
        rope = _of_layer(kind, found) if turned else None
        return Scheme.of(*([rope] if rope else []), *_sees(config, text, kind, way), way)

    each = {n: scheme(kind, turns(n, kind)) for n, kind in attends.items()}
    if not each:
        return {}
    schemes = tuple(each.values())
    whole = schemes[0] if len(set(schemes)) == 1 else Layers(schemes)
    rows: dict[str, tuple[int, ...]] = {}
    for n, kind in enumerate(types):
        what = str(each[n]) if n in each else f"no attention ({kind})"
        rows[what] = (*rows.get(what, ()), n)
    return {"scheme": str(whole)} | ({"layers": tuple(rows.items())} if len(rows) > 1 else {})


def _of_layer(kind: str | None, found: Mapping[str | None, Rope | None]) -> Rope | None:
    """The rotation of a type of layer. DeepSeek-V4 names two otherwise: "main" is that of layers
    which see a window alone, "compress" of all others."""
    if kind in found:
        return found[kind]
    slides = kind is None or "sliding" in kind
    return found.get("main" if slides else "compress", found.get(None))


def _turning(config: Any, text: str) -> Callable[[int, str | None], bool]:
    """Whether a layer turns anything: a list says it (1: it does), or a condition in the code."""
    listed, size = entry_of(config, "no_rope_layers"), entry_of(config, "sliding_window")
    if isinstance(listed, list) and listed:
        return lambda n, kind: bool(listed[n]) if n < len(listed) else True
    only = ONLY_SLIDING.search(text) or (size is not None and UNLESS_FULL.search(text))
    return lambda n, kind: not only or (kind is not None and "sliding" in kind)


def _sees(config: Any, text: str, kind: str | None, way: Causal | Bidirectional) -> list[Any]:
    """The mask of a layer besides its direction."""
    size, chunk = (entry_of(config, n) for n in ("sliding_window", "attention_chunk_size"))
    if kind is not None and "chunked" in kind and isinstance(chunk, int):
        return [Chunked(chunk)]
    alone = kind is None and entry_of(config, "use_sliding_window", True)
    slides = kind is not None and "sliding" in kind
    if not isinstance(size, int) or not (slides or (alone and "sliding_window_causal" in text)):
        return []
    return [Window(size + 1 if isinstance(way, Bidirectional) else size)]
