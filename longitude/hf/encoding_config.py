"""The position encoding of a configuration as a scheme, layer by layer where layers differ.

`describe` returns the fields of an `Encoding` (encodings.py). What no entry states is read from the
model's source: the row of a table's first position (OPT and BART leave two rows free, RoBERTa
counts from its padding), the spacing of sinusoids, the direction of attention, which layers don't
rotate (SmolLM3, Llama 4, Cohere 2, EXAONE 4) or have a window. Rotations that rope(…) can't
express, such as by rows and columns of an image, get a note; M-RoPE's scheme is the one for text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from longitude import parts
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.merge_scheme import as_layers
from longitude.hf.modeling_source import entry_of, pair_layout
from longitude.hf.rope_config import (
    FULL,
    LAYERS,
    ORIGINAL,
    THETAS,
    is_number,
    main_rope_dict,
    ropes,
)

WINDOWS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
WINDOWS += ("seq_length", "n_ctx", "max_sequence_length", "max_text_len")
SOURCE = ("max_source_positions", "max_encoder_position_embeddings", "max_speech_positions")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
LARGEST = 2**24  # upper bound on numbers of layers, heads and dimensions
WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "n_embed")
BASES = (*THETAS, "rotary_embedding_base", "rotary_base", "layer_rope_theta")

FREE_ROWS = re.compile(r"self\.offset = (\d+)")
FROM_PADDING = re.compile(r"create_position_ids_from_input_ids|padding_idx \+ 1")
ENDPOINT = re.compile(r"half_dim - 1|channels // 2 - 1|embed_positions\.requires_grad_\(False\)")
CONCATENATED = re.compile(r"torch\.cat\(\[?\(?\s*\[?(?:torch\.)?sin|0:sentinel|: ?sentinel")
EITHER_WAY = re.compile(r"causal_mask if \S*is_decoder else")
CAUSAL = re.compile(r"causal_mask|is_causal ?= ?True|ForCausalLM|LMHead\w*Model|\btril\(|\btriu\(")
NO_ATTENTION = re.compile(r"linear|mamba|conv|recurrent|moe|mlp")  # in the names of layer types
ONLY_SLIDING = re.compile(
    r"if self\.(?:sliding_window is not None|is_local_attention|is_sliding)\b.*:\n(?:.*\n){0,3}?"
    r".*apply_rotary"
)
UNLESS_FULL = re.compile(
    r"if self\.sliding_window is None or self\.is_sliding:\n(?:.*\n){0,3}?.*apply_rotary"
)
# by model type: classes of rotary embeddings whose input is the image (families/axial.py)
IMAGE_ROTARIES = {
    "dinov3_vit": "DINOv3ViTRopePositionEmbedding",
    "llama4_vision_model": "Llama4VisionRotaryEmbedding",
}
BY_PLACE = "it rotates by the rows and columns of an image"
MROPE = "image and video tokens have three positions each (M-RoPE{}), equal ones in a text"
REARRANGED = (
    "pairs are adjacent in its weights, and rearranged half a head apart before they rotate"
)
FALCON_RW = "its bias is divided by √d together with the scores, unlike the paper's"
Fields = dict[str, Any]


def describe(kind: str, config: Any, source: Mapping[str, str], part: str, where: str) -> Fields:
    """Return the fields of an `Encoding` of this kind, except kind and part."""
    window, key = stated_window(config, "" if kind == "rope" else part)
    fields: Fields = {"where": where, "window": window, "window_from": key}
    fields |= {"heads": entry(config, HEADS), "head_dim": head_dim(config)}
    if kind == "rope":
        return fields | _rope(config, source)
    try:
        scheme, more = _absolute(kind, config, "\n".join(source.values()), window, part)
    except (UserError, TypeError, AttributeError):  # its sizes are refused by every part
        return fields
    return fields | ({"scheme": str(scheme)} if scheme else {}) | more


def stated_window(config: Any, part: str = "") -> tuple[int | None, str | None]:
    """Return the longest input that a configuration allows, and the entry that states it."""
    names = (*SOURCE, *WINDOWS) if part.endswith("encoder") else (*WINDOWS, *SOURCE)
    for name in names:
        value = entry_of(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, name
    return None, None


def entry(config: Any, names: tuple[str, ...]) -> Any:
    """Return the first of these entries of a configuration that is a positive integer."""
    for name in names:
        value = entry_of(config, name)
        if isinstance(value, int) and value >= LARGEST:
            raise UserError(
                f"the configuration's {name} is {value}, but no model is as large: correct it."
            )
        if isinstance(value, int) and value > 0:
            return value
    return None


def head_dim(config: Any) -> int | None:
    """Return the size of a head. For latent attention it includes the rotated and the unrotated
    dimensions; if layers differ (Gemma 4), it is the largest."""
    if (count := entry(config, LAYERS)) and entry_of(config, "_heterogeneity_spec") is not None:
        sizes = (head_dim(config.per_layer_config[n]) for n in range(count))
        return max(filter(None, sizes), default=None)
    pieces = [entry_of(config, f"qk_{n}_head_dim") for n in ("nope", "rope")]
    if all(isinstance(each, int) for each in pieces):
        return sum(filter(None, pieces))
    width, heads = entry(config, WIDTH), entry(config, HEADS)
    stated = entry(config, ("head_dim", "kv_channels"))
    return stated or (width // heads if width and heads else None)


def _of_images(config: Any) -> bool:
    names = ("patch_size", "image_size", "num_channels")
    images = any(entry_of(config, name) is not None for name in names)
    return images and entry_of(config, "vocab_size") is None


def direction(text: str, config: Any = None, part: str = "") -> parts.Causal | parts.Bidirectional:
    """Return whether attention is causal or bidirectional, by the source; causal if unclear."""
    if part.endswith("encoder"):
        return parts.Bidirectional()
    if part.endswith("decoder") or getattr(config, "is_decoder", False):
        return parts.Causal()
    unmasked = EITHER_WAY.search(text) and entry_of(config, "is_decoder") is False
    if unmasked or entry_of(config, "causal") is False:  # an entry of XLM and FlauBERT
        return parts.Bidirectional()
    masks = re.findall(r"create_\w*mask", text)
    if masks:
        return parts.Causal() if any("causal" in mask for mask in masks) else parts.Bidirectional()
    return parts.Causal() if CAUSAL.search(text) or not text else parts.Bidirectional()


def _absolute(
    kind: str, config: Any, text: str, window: int | None, part: str
) -> tuple[Scheme | None, Fields]:
    """Return the scheme of a table, of sinusoids or of a bias, if a part fits, and more fields."""
    mask = direction(text, config, part)
    match kind:
        case "learned" | "sinusoidal" if window is None or _of_images(config):
            return None, {}
        case "learned":
            free_rows, padding = FREE_ROWS.search(text), getattr(config, "pad_token_id", None)
            first = padding + 1 if isinstance(padding, int) and FROM_PADDING.search(text) else 0
            offset = int(free_rows[1]) if free_rows else first
            length = (window or 0) - (0 if free_rows else offset)
            return Scheme.of(parts.Learned(length, offset), mask), {"window": length}
        case "sinusoidal":
            spacing = "endpoint" if ENDPOINT.search(text) else "paper"
            concatenated = CONCATENATED.search(text) or spacing == "endpoint"
            layout = "concatenated" if concatenated else "interleaved"
            return Scheme.of(parts.Sinusoidal(layout=layout, spacing=spacing), mask), {}
        case "alibi":
            scaled = re.search(r"alibi / math\.sqrt\(", text)
            return Scheme.of(parts.Alibi()), {"notes": (FALCON_RW,)} if scaled else {}
        case "t5" if buckets := entry(config, ("relative_attention_num_buckets",)):
            max_distance = entry(config, ("relative_attention_max_distance",)) or 128
            encoder = Scheme.of(parts.T5(buckets, max_distance, True), parts.Bidirectional())
            decoder = Scheme.of(parts.T5(buckets, max_distance, False), parts.Causal())
            if entry_of(config, "is_encoder_decoder") and not part:
                rows = ((f"encoder: {encoder}", ()), (f"decoder: {decoder}", ()))
                return decoder, {"layers": rows}
            return encoder if not text or isinstance(mask, parts.Bidirectional) else decoder, {}
        case "transformer-xl" if hasattr(config, "clamp_len"):
            bidirectional = getattr(config, "attn_type", "uni") == "bi"
            xl = parts.TransformerXl(max(0, config.clamp_len or 0))
            return Scheme.of(xl, parts.Bidirectional() if bidirectional else parts.Causal()), {}
        case "deberta":
            max_distance = getattr(config, "max_relative_positions", -1)
            span = max_distance if max_distance and max_distance > 0 else window
            buckets = getattr(config, "position_buckets", 0) or 0
            terms = getattr(config, "pos_att_type", None) or ()
            terms = terms.split("|") if isinstance(terms, str) else terms
            bias = parts.Deberta(span or 512, max(0, buckets), "c2p" in terms, "p2c" in terms)
            learned = window if entry_of(config, "position_biased_input") else None
            table = [parts.Learned(learned)] if learned else []
            return Scheme.of(*table, bias, parts.Bidirectional()), {}
    return None, {}  # such as two-dimensional buckets (LayoutLM) or gated biases (WavLM)


Ropes = Mapping[str | None, parts.Rope | None]


def _rope(config: Any, source: Mapping[str, str]) -> Fields:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    layout, rearranged = pair_layout(source)
    fields: Fields = {"pairs": layout}
    fields |= {"where": "rope_parameters of the configuration"} if parameters else {}
    try:
        if _of_images(config):
            return (
                fields
                | _inexpressible(parameters or {}, BY_PLACE)
                | _axial(config, parameters, source)
            )
        if parameters or getattr(config, "position_embedding_type", None) == "rotary":
            by_type = ropes(config) if hasattr(config, "get_text_config") else {None: None}
        else:  # only the source has a rotation: the usual base, unless an entry states one
            base = next((v for n in BASES if is_number(v := entry_of(config, n))), 10000)
            head, rotated = head_dim(config), entry_of(config, "rotary_dim")
            by_type = {None: parts.Rope(float(base), rotated / head if rotated and head else 1)}
        by_type = {kind: rope and replace(rope, pairs=layout) for kind, rope in by_type.items()}
    except (UserError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        return fields | _inexpressible(parameters or {}, str(error))
    main = _of_layer(FULL, by_type) or next(filter(None, by_type.values()), None)
    if main is None:
        return fields
    scaling = None if main.frequencies == parts.Unscaled() else main.frequencies
    fields |= {"base": float(main.base), "fraction": main.fraction, "pairs": main.pairs}
    fields |= {"scaling": str(scaling) if scaling else None}
    fields |= {"original": getattr(scaling, "original", None)}
    fields["notes"] = (*((REARRANGED,) if rearranged else ()), *_notes(config, main, source))
    return fields | _layer_schemes(config, "\n".join(source.values()), by_type)


def _inexpressible(parameters: Mapping[str, Any], why: str) -> Fields:
    """Return the fields of a rotation that rope(…) can't express."""
    entries = main_rope_dict(parameters)
    base, share = entries.get("rope_theta"), entries.get("partial_rotary_factor")
    kind = entries.get("rope_type") or entries.get("type")
    return {
        "base": float(base) if is_number(base) else None,
        "fraction": float(share) if is_number(share) else None,
        "scaling": None if kind in (None, "default", "axial") else str(kind),
        "original": entries.get(ORIGINAL),
        "notes": (BY_PLACE if kind == "axial" else why,),
    }


def _axial(config: Any, parameters: Mapping[str, Any] | None, source: Mapping[str, str]) -> Fields:
    """Return base and scheme of a vision tower, if its source splits frequencies in a known way."""
    entries, text = main_rope_dict(parameters or {}), "\n".join(source.values())
    patterns = {"shared": "spatial_dim = dim // 2", "alternating": "inv_freq[0::2], inv_freq[1::2]"}
    known = [spectrum for spectrum, pattern in patterns.items() if pattern in text]
    kind, base = entry_of(config, "model_type"), entries.get("rope_theta")
    if kind in IMAGE_ROTARIES and IMAGE_ROTARIES[kind] in text:
        known, base = ["shared"], base or entry_of(config, "rope_theta")
    elif entries.get("rope_type") != "axial" or len(known) != 1:
        return {}
    if not is_number(base):
        return {}
    axes: Any = parts.Axial(known[0])  # type: ignore[arg-type]
    rope = replace(parts.Rope(float(base), axes=axes), pairs=pair_layout(source)[0])
    return {"base": float(base), "scheme": str(Scheme.of(rope, parts.Bidirectional()))}


def _notes(config: Any, rope: parts.Rope, source: Mapping[str, str]) -> Iterator[str]:
    """Yield what else the model does with positions, which the scheme does not express."""
    own, rates = entry_of(config, "rope_parameters"), entry_of(config, "compress_rates")
    if any("mrope_section" in text for text in source.values()):
        sections = main_rope_dict(own or {}).get("mrope_section")
        yield MROPE.format(f", sections {sections}" if sections else "")
    if any("hybrid" in str(kind) for kind in entry_of(config, "layer_types") or ()):
        yield "a state space runs beside attention in its hybrid layers, and is left alone"
    if rates:
        listed = " or ".join(str(rate) for rate in sorted(rates.values()))
        yield f"keys past the sliding window are compressed, {listed} to one (DeepSeek-V4)"
    if entry_of(config, "attn_temperature_tuning") or (own and "llama_4_scaling_beta" in own):
        yield "queries at large positions are scaled up (Llama 4's temperature)"
    if getattr(rope.frequencies, "mscale_all_dim", None) and any(
        "yarn_apply_mscale" in text or "mscale * mscale" in text for text in source.values()
    ):
        yield "scores are multiplied by (0.1 · mscale_all_dim · ln factor + 1)² besides"


def _layer_schemes(config: Any, text: str, found: Ropes) -> Fields:
    """Return the scheme of all attention layers, and the layers of each scheme if they differ."""
    count = entry(config, LAYERS) or 1
    types = list(entry_of(config, "layer_types") or [None] * count)[:count]
    mask, rope_flags = direction(text, config), entry_of(config, "no_rope_layers")
    window, chunk = (entry_of(config, n) for n in ("sliding_window", "attention_chunk_size"))
    only_sliding = ONLY_SLIDING.search(text) or (window is not None and UNLESS_FULL.search(text))
    everywhere = entry_of(config, "use_sliding_window", True) and "sliding_window_causal" in text

    bases = entry_of(config, "layer_rope_theta") or [None] * len(types)  # 0: no rotation (Granite)

    def rotates(n: int, kind: str | None) -> bool:
        if bases[n] == 0:
            return False
        if isinstance(rope_flags, list) and rope_flags:
            return bool(rope_flags[n]) if n < len(rope_flags) else True
        return not only_sliding or "sliding" in (kind or "")

    @cache
    def scheme(kind: str | None, rotated: bool, base: float | None) -> Scheme:
        rope = _of_layer(kind, found) if rotated else None
        filled: list[Any] = [replace(rope, base=float(base)) if rope and base else rope]
        if "chunked" in (kind or "") and isinstance(chunk, int):
            filled.append(parts.Chunked(chunk))
        elif isinstance(window, int) and (everywhere if kind is None else "sliding" in kind):
            bidirectional = isinstance(mask, parts.Bidirectional)
            filled.append(parts.Window(window + 1 if bidirectional else window))
        return Scheme.of(*filter(None, filled), mask)

    attending = [n for n, kind in enumerate(types) if not (kind and NO_ATTENTION.search(kind))]
    by_layer = {n: scheme(types[n], rotates(n, types[n]), bases[n]) for n in attending}
    if not by_layer:
        return {}
    schemes = tuple(by_layer.values())
    layers_of: dict[str, tuple[int, ...]] = {}
    for n, kind in enumerate(types):
        label = str(by_layer[n]) if n in by_layer else f"no attention ({kind})"
        layers_of[label] = (*layers_of.get(label, ()), n)
    return {"scheme": str(as_layers(schemes))} | (
        {"layers": tuple(layers_of.items())} if len(layers_of) > 1 else {}
    )


def without_positions(config: Any) -> Fields:
    """Return which layers of a model without an encoding attend, if not all do (Jamba)."""
    fields = _layer_schemes(config, "", {None: None})
    return fields if "layers" in fields else {}


def _of_layer(kind: str | None, found: Ropes) -> parts.Rope | None:
    """Return the rotation of a layer type. DeepSeek-V4 has other names: "main" for layers with a
    sliding window only, "compress" for all others."""
    if kind in found:
        return found[kind]
    is_sliding = kind is None or "sliding" in kind
    return found.get("main" if is_sliding else "compress", found.get(None))
