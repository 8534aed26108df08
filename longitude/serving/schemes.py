"""The scheme of each layer of a model that vLLM serves: its own, and the one that is requested.

Both come from the configuration, through the code that reads it for `inspect` and completes schemes
for `longitude.hf.patched`. The worker compares the own schemes with what vLLM's modules compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longitude.core.part import Index, K, Q, Rows, Term, Weights
from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.hf.encoding_config import HEADS, LAYERS, entry, head_dim
from longitude.hf.encodings import KINDS, encodings
from longitude.hf.merge_scheme import merge_scheme
from longitude.hf.patch import window
from longitude.ops.attention import attention
from longitude.parts import DynamicLinear, DynamicNtk, DynamicYarn
from longitude.parts.distance_bias import ByDistance

SERVED = ("rope", "alibi", "none")  # kinds of encodings that are applied in attention
DYNAMIC = (DynamicLinear, DynamicNtk, DynamicYarn)


def own_schemes(config: Any) -> dict[int, Scheme]:
    """Return the model's own scheme for each attention layer."""
    model_encodings = encodings(config)
    name = getattr(config, "model_type", "this model")
    kinds = {each.kind for each in model_encodings}
    other = next((kind for kind in kinds if kind not in SERVED), None)
    if other is not None or len(kinds) > 1:
        what = KINDS[other] if other else " and ".join(sorted(kinds))
        raise UserError(
            f"{name} has no encoding that attention could change ({what}): serve it without a "
            f"scheme; `longitude export` writes longer tables into a checkpoint."
        )
    enc, count = model_encodings[0], entry(config, LAYERS) or 1
    if enc.scheme is None and enc.kind != "none":
        why = "; ".join(enc.notes).rstrip(".") or "its rotation has no written form"
        raise UserError(f"{name} can't be served under another scheme: {why}.")
    if enc.layers:
        rows = [(parse(text), numbers) for text, numbers in enc.layers if "attention (" not in text]
        own = {n: scheme.layer(0) for scheme, numbers in rows for n in numbers}
        return dict(sorted(own.items()))
    scheme = parse(enc.scheme or "nope()")
    return {n: scheme.layer(n, count) for n in range(count)}


def layer_schemes(config: Any, text: str, force: bool = False) -> dict[int, Scheme]:
    """Return the requested scheme for each attention layer, completed from the layer's own."""
    own = own_schemes(config)
    bidirectional = next((scheme for scheme in own.values() if not scheme.causal), None)
    if bidirectional is not None:
        raise UserError(
            f"a KV cache needs causal attention, but {getattr(config, 'model_type', 'the model')} "
            f"attends both ways ({bidirectional}): schemes are for decoders."
        )
    requested = merge_scheme(text, list(own.values()), window(config), force)
    if requested == list(own.values()):
        rotates = parse(text).layer(0).rotary and not any(scheme.rotary for scheme in requested)
        what = "rotates, and the model does not:" if rotates else "is what the model has,"
        raise UserError(f"{shown(text)} {what} {shown(requested[0])}: serve it without a scheme.")
    return dict(zip(own, requested, strict=True))


def check_schemes(config: Any, text: str, length: int, force: bool = False) -> None:
    """Raise if the scheme does not run on heads of this model's size."""
    heads, size = entry(config, HEADS) or 1, head_dim(config)
    for scheme in dict.fromkeys(layer_schemes(config, text, force).values()):
        if size is not None:
            x = torch.zeros(1, heads, 2, size)
            attention(scheme, x, x, x, range(2), range(2), length=length)


def dynamic_part(config: Any, text: str, force: bool = False) -> Any:
    """Return the frequencies of a scheme that depend on the total length, or None."""
    ropes = [scheme.rotary for scheme in layer_schemes(config, text, force).values()]
    parts = [rope.frequencies for rope in ropes if rope is not None]
    return next((part for part in parts if isinstance(part, DYNAMIC)), None)


@dataclass(frozen=True)
class SomeHeads:
    """A bias on those heads of a layer that one rank of a tensor-parallel group holds.

    `times` is the factor that vLLM applies to the model's own bias: Falcon's is divided by √d. The
    bias has the name of the part that it wraps, but no written form.
    """

    part: Any
    first: int
    total: int
    times: float = 1.0

    @property
    def name(self) -> str:
        return str(self.part.name)

    @property
    def flat_beyond(self) -> int | None:
        return self.part.flat_beyond

    def init(self, dims: Any, rng: Any) -> Weights:
        return {}

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        all_heads = q[:, :1].expand(-1, self.total, -1, -1)
        term: Any = self.part.term(all_heads, k, q_pos, k_pos, weights, scale)
        if not isinstance(term, ByDistance):
            raise UserError(
                f"{self.part} can't be split over ranks: use a tensor-parallel size of 1."
            )
        return replace(term, value=partial(_shifted, term.value, self), rows=None)


def _shifted(value: Any, some: SomeHeads, h: Index, r: Tensor) -> Tensor:
    return some.times * value(h + some.first, r)


def on_heads(scheme: Scheme, first: int, count: int, total: int, times: float = 1.0) -> Scheme:
    """Restrict the scheme's biases to `count` of a layer's heads."""
    if not scheme.bias or (count == total and times == 1):
        return scheme
    bias: Any = tuple(SomeHeads(part, first, total, times) for part in scheme.bias)
    return replace(scheme, bias=bias)
