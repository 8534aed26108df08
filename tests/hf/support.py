"""What is supported, a row per architecture: the table of the docs, from the grid of tiny.py.

A row is read off the configuration alone, as `longitude inspect` does. test_architectures.py holds
it against what the probe finds in the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.hf.encodings import encodings
from longitude.parts import Chunked, Window
from tests.hf.tiny import DECODERS, MULTIMODAL, REFUSED, config_of

LEFT_ALONE = {  # by the names of layer types
    "linear_attention": "linear attention or state space",
    "conv": "convolutions",
    "mlp": "feed-forward layers",
    "hybrid": "state space beside attention",
}


@dataclass(frozen=True)
class Row:
    """One architecture: its kinds of attention, and what a patch does not touch."""

    model_type: str
    attention: tuple[str, ...]
    left_alone: tuple[str, ...] = ()
    note: str = ""


def words(scheme: Scheme) -> str:
    """The kind of attention of a layer, without the numbers of a tiny model."""
    rope, said = scheme.rotary, ["no positions"]
    if rope is not None:
        said = ["RoPE" if rope.fraction == 1 else "RoPE on part of a head"]
        said += ["adjacent pairs"] if rope.pairs == "adjacent" else []
    said += ["sliding window"] if any(isinstance(m, Window) for m in scheme.mask) else []
    said += ["chunks"] if any(isinstance(m, Chunked) for m in scheme.mask) else []
    return ", ".join(said)


def row(kind: str) -> Row:
    """The row of an architecture that can be patched."""
    config = config_of(kind)
    found = encodings(config)[0]
    texts = [text for text, _ in found.layers if not text.startswith("no attention")]
    schemes = [s for text in texts or [found.scheme or "nope()"] for s in _each(parse(text))]
    types = dict.fromkeys(getattr(config, "layer_types", None) or ())
    notes = ["latent attention"] if hasattr(config, "qk_rope_head_dim") else []
    notes += ["M-RoPE: one position for a text"] if "M-RoPE" in "".join(found.notes) else []
    return Row(
        kind,
        tuple(dict.fromkeys(map(words, schemes))),
        tuple(LEFT_ALONE[name] for name in types if name in LEFT_ALONE),
        "; ".join(notes),
    )


def _each(scheme: Any) -> list[Scheme]:
    return [scheme.layer(n) for n in range(len(scheme))]


def rows() -> list[Row]:
    """Every architecture of the grid that can be patched, by name."""
    return [row(kind) for kind in sorted(DECODERS)]


def multimodal() -> list[tuple[str, str]]:
    """Every multimodal model that is patched with images, and how its sections lie."""
    return [(kind, one.order) for kind, one in MULTIMODAL.items()]


def refused() -> list[tuple[str, str]]:
    """Every architecture of the grid that is refused, and why."""
    return [(kind, REFUSED[kind].why) for kind in sorted(REFUSED)]
