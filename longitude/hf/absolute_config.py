"""Encodings that turn nothing, as schemes: tables, sines, and biases by distance.

What of them stands in no entry is read from the code: where a table's first position lies (OPT and
BART leave two rows free, RoBERTa counts from its padding), how sines are spaced, whether a query
sees what follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.hf.modeling_source import entry_of
from longitude.parts import (
    T5,
    Alibi,
    Bidirectional,
    Causal,
    Deberta,
    Learned,
    Sinusoidal,
    TransformerXl,
)

WINDOWS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_sequence_length",
    "max_text_len",
)
SOURCE = ("max_source_positions", "max_encoder_position_embeddings", "max_speech_positions")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "n_embed")
FREE = re.compile(r"self\.offset = (\d+)")
FROM_PADDING = re.compile(r"create_position_ids_from_input_ids|padding_idx \+ 1")
ENDPOINT = re.compile(r"half_dim - 1|channels // 2 - 1|embed_positions\.requires_grad_\(False\)")
BESIDE = re.compile(r"torch\.cat\(\[?\(?\s*\[?(?:torch\.)?sin|0:sentinel|: ?sentinel")
EITHER = re.compile(r"causal_mask if \S*is_decoder else")
ONE_WAY = re.compile(r"causal_mask|is_causal ?= ?True|ForCausalLM|LMHead\w*Model|\btril\(|\btriu\(")


def describe_absolute(
    kind: str, config: Any, lines: Mapping[str, str], part: str, where: str
) -> dict[str, Any]:
    """What is to be said of an encoding of this kind, besides its kind."""
    text = "\n".join(lines.values())
    window, key = stated_window(config, part)
    told: dict[str, Any] = {"where": where, "window": window, "window_from": key}
    told |= {"heads": entry(config, HEADS), "head_dim": head_dim(config)}
    make = {
        "learned": _learned,
        "sinusoidal": _sinusoidal,
        "alibi": _alibi,
        "t5": _t5,
        "transformer-xl": _transformer_xl,
        "deberta": _deberta,
    }.get(kind)
    try:
        made = make(config, text, window, part) if make else None
    except (UserError, TypeError, AttributeError):  # sizes that no part takes
        made = None
    if made is None:
        return told
    scheme, more = made
    return told | {"scheme": str(scheme)} | more


Made = tuple[Scheme, dict[str, Any]] | None


def stated_window(config: Any, part: str = "") -> tuple[int | None, str | None]:
    """The longest input that a configuration allows, and the entry that says so."""
    names = (*SOURCE, *WINDOWS) if part.endswith("encoder") else (*WINDOWS, *SOURCE)
    for name in names:
        value = entry_of(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, name
    return None, None


def entry(config: Any, names: tuple[str, ...]) -> Any:
    """The first of these entries that a configuration has as a whole number."""
    values = (entry_of(config, name) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), None)


def head_dim(config: Any) -> int | None:
    """The dimensions of a head; of multi-head latent attention, the still and the turned ones."""
    pieces = [entry_of(config, f"qk_{n}_head_dim") for n in ("nope", "rope")]
    if all(isinstance(each, int) for each in pieces):
        return sum(filter(None, pieces))
    width, heads = entry(config, WIDTH), entry(config, HEADS)
    own = _largest(config) or entry(config, ("head_dim", "kv_channels"))
    return own or (width // heads if width and heads else None)


def _largest(config: Any) -> int | None:
    """The largest head where layers differ in it: Gemma 4's, in the layers that see everything."""
    count = entry(config, LAYERS)
    if entry_of(config, "_heterogeneity_spec") is None or not count:
        return None
    sizes = [entry_of(config.per_layer_config[n], "head_dim") for n in range(count)]
    return max((size for size in sizes if size), default=None)


def of_pictures(config: Any) -> bool:
    """Whether a configuration is of images, whose positions are rows and columns."""
    seen = any(
        entry_of(config, name) is not None for name in ("patch_size", "image_size", "num_channels")
    )
    return seen and entry_of(config, "vocab_size") is None


def direction(text: str, config: Any = None, part: str = "") -> Causal | Bidirectional:
    """Whether queries see what follows them, as far as the code says: one way where it is open."""
    if part.endswith("encoder"):
        return Bidirectional()
    if part.endswith("decoder") or getattr(config, "is_decoder", False):
        return Causal()
    either = EITHER.search(text) and entry_of(config, "is_decoder") is False
    if either or entry_of(config, "causal") is False:  # an entry of XLM and FlauBERT
        return Bidirectional()
    masks = re.findall(r"create_\w*mask", text)
    if masks:
        return Causal() if any("causal" in mask for mask in masks) else Bidirectional()
    return Causal() if ONE_WAY.search(text) or not text else Bidirectional()


def _learned(config: Any, text: str, window: int | None, part: str) -> Made:
    if window is None or of_pictures(config):
        return None
    free = FREE.search(text)
    padding = getattr(config, "pad_token_id", None)
    counted = padding + 1 if isinstance(padding, int) and FROM_PADDING.search(text) else 0
    offset = int(free[1]) if free else counted
    length = window if free else window - offset
    return Scheme.of(Learned(length, offset), direction(text, config, part)), {"window": length}


def _sinusoidal(config: Any, text: str, window: int | None, part: str) -> Made:
    if window is None or of_pictures(config):
        return None
    spacing = "endpoint" if ENDPOINT.search(text) else "paper"
    layout = "concatenated" if BESIDE.search(text) or spacing == "endpoint" else "interleaved"
    return Scheme.of(Sinusoidal(layout=layout, spacing=spacing), direction(text, config, part)), {}


def _alibi(config: Any, text: str, window: int | None, part: str) -> Made:
    # Falcon-RW alone divides the bias by √d together with the scores
    note = "its bias is divided by √d together with the scores, unlike the paper's"
    scaled = re.search(r"alibi / math\.sqrt\(", text)
    return Scheme.of(Alibi()), {"notes": (note,)} if scaled else {}


def _t5(config: Any, text: str, window: int | None, part: str) -> Made:
    buckets = entry(config, ("relative_attention_num_buckets",))
    if buckets is None:  # of two dimensions (LayoutLM) or gated (WavLM), which the part is not
        return None
    most = entry(config, ("relative_attention_max_distance",)) or 128
    both = not text or isinstance(direction(text, config, part), Bidirectional)
    if entry_of(config, "is_encoder_decoder") and not part:
        halves = {"encoder": _bias(buckets, most, True), "decoder": _bias(buckets, most, False)}
        rows = tuple((f"{name}: {scheme}", ()) for name, scheme in halves.items())
        return halves["decoder"], {"layers": rows}
    return _bias(buckets, most, both), {}


def _bias(buckets: int, most: int, both: bool) -> Scheme:
    return Scheme.of(T5(buckets, most, both), Bidirectional() if both else Causal())


def _transformer_xl(config: Any, text: str, window: int | None, part: str) -> Made:
    if not hasattr(config, "clamp_len"):
        return None
    clamp = max(0, config.clamp_len or 0)
    both = getattr(config, "attn_type", "uni") == "bi"
    return Scheme.of(TransformerXl(clamp), Bidirectional() if both else Causal()), {}


def _deberta(config: Any, text: str, window: int | None, part: str) -> Made:
    most = getattr(config, "max_relative_positions", -1)
    span = most if most and most > 0 else window
    buckets = getattr(config, "position_buckets", 0) or 0
    asked = getattr(config, "pos_att_type", None) or ()
    asked = asked.split("|") if isinstance(asked, str) else asked
    bias = Deberta(span or 512, max(0, buckets), "c2p" in asked, "p2c" in asked)
    learned = window if entry_of(config, "position_biased_input") else None
    parts = (Learned(learned), bias) if learned else (bias,)
    return Scheme.of(*parts, Bidirectional()), {}
