"""Attention under `torch.compile`: one kind of call a compiler sees whole, all others apart.

A call over contiguous positions that is one pass, full or causal, is a turn and SDPA. What it
needs of its scheme (is it such a call? which tables?) is settled once, while the compiler traces,
and enters the graph as constants; the turn then fuses with what stands before it. Every other call
leaves the graph and runs as it would without a compiler, its own kernels compiled by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.core.part import Pos
from longitude.core.scheme import Scheme
from longitude.ops import sdpa as native
from longitude.ops.attention import Call, run
from longitude.ops.inputs import prepare
from longitude.ops.passes import make_passes
from longitude.parts.rope import Pairs, apply_rotary
from longitude.parts.rotary_tables import Tables, cos_sin


@dataclass(frozen=True)
class Whole:
    """What is constant in a call of one pass: its mask, its scale, and the tables that turn it."""

    causal: bool
    scale: float
    q: Tables | None = None
    k: Tables | None = None
    pairs: Pairs = "half"


def traced(call: Call, backend: str, options: dict[str, Any]) -> Tensor:
    """Attention in a graph that is being traced, or beside it."""
    scheme, q, k, v, q_pos, k_pos, _ = call
    found = whole(scheme, q, k, q_pos, k_pos, options) if backend == "auto" else None
    if found is not None:
        return in_graph(found, q, k, v)
    return apart(call, backend, options)  # type: ignore[call-issue]


apart = torch.compiler.disable(run)


def whole(
    scheme: Scheme, q: Tensor, k: Tensor, q_pos: Pos, k_pos: Pos, options: dict[str, Any]
) -> Whole | None:
    """The constants of a call that is one pass over contiguous positions, or None."""
    given = [name for name, value in options.items() if value is not None and name != "dropout"]
    if scheme.bias or scheme.scale or given or options["dropout"]:
        return None
    if not (isinstance(q_pos, range) and isinstance(k_pos, range)):
        return None
    # made anew, a range's ends are constants to a compiler; the sizes of tensors need not be
    q_pos, k_pos = (range(pos.start, pos.stop, pos.step) for pos in (q_pos, k_pos))
    if len(q_pos) != q.shape[2] or len(k_pos) != k.shape[2]:
        return None  # outside, where the sentence is
    ends = (q_pos.start, q_pos.stop, k_pos.start, k_pos.stop)
    rest = (q.shape[3], torch.promote_types(q.dtype, torch.float32), q.device)
    apart = q_pos.step != 1 or k_pos.step != 1 or len(q_pos) < 2 or not k_pos
    return None if apart else scheme.settled(_constants, scheme.written, ends, *rest)


def in_graph(found: Whole, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A turn and SDPA: nothing here but tensors."""
    if found.q is not None and found.k is not None:
        q, k = apply_rotary(q, *found.q, found.pairs), apply_rotary(k, *found.k, found.pairs)
    grouped = q.shape[1] != k.shape[1]
    return sdpa(q, k, v, is_causal=found.causal, scale=found.scale, enable_gqa=grouped)


def _constants(
    scheme: Scheme,
    ends: tuple[int, int, int, int],
    d: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Whole | None:
    q_pos, k_pos = range(*ends[:2]), range(*ends[2:])
    q, k = (torch.empty(1, 1, len(pos), d, dtype=dtype, device="meta") for pos in (q_pos, k_pos))
    p = prepare(scheme, q, k, k, q_pos, k_pos, None, scale=None, segments=None, length=None)
    if p.overflows or not native.single(p):
        return None
    causal, region = bool(native.causal(p, scheme.areas())), make_passes(p)[0].region
    if scheme.rotary is None or region is None:
        return Whole(causal, p.scale)
    centre = float(q_pos[-1]) if scheme.rotary.decay else 0.0
    tables = [
        cos_sin(
            scheme.rotary, region, side, pos, d, length, dtype=dtype, device=device, centre=centre
        )
        for side, pos, length in (("q", q_pos, p.q_length), ("k", k_pos, p.k_length))
    ]
    return Whole(causal, p.scale, *tables, pairs=scheme.rotary.pairs)
