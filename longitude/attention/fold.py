"""One query needs one pass: each key turned by its own distance to it, whatever its region.

This is how decoding runs every remap on plain attention: q stays unturned and key j turns to minus
the distance that its region gives the pair, so q·k sees that distance. The tables of one step are
made once and serve every layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from longitude.attention.lower import Pass, lower, wide_type
from longitude.attention.problem import Length, Problem
from longitude.part import Pos, Region, as_tensor
from longitude.parts.rotary.memo import Memo, Tables
from longitude.parts.rotary.rope import Rope
from longitude.parts.rotary.tables import cos_sin
from longitude.parts.rotary.turn import turn
from longitude.region import Area, visible

Pieces = tuple[tuple[Region, tuple[Area, ...]], ...]


def fold(p: Problem) -> Pass:
    """The single pass of a single query."""
    rope, passes = p.scheme.rotary, lower(p)
    if rope is None or len(passes) == 1:
        return passes[0]
    pieces = tuple((one.region, one.areas) for one in passes if one.region is not None)
    fixed = (
        isinstance(p.q_pos, range) and isinstance(p.k_pos, range) and isinstance(p.k_length, int)
    )
    make = _made_once if fixed and not torch.compiler.is_compiling() else _make
    size, dtype = p.k.shape[-1], wide_type(p.k)
    cos, sin = make(rope, pieces, p.q_pos, p.k_pos, size, p.k_length, dtype, p.k.device)
    turned = replace(p, k=turn(p.k, cos, sin, rope.pairs))
    return Pass(turned, tuple(area for one in passes for area in one.areas))


def _make(
    rope: Rope,
    pieces: Pieces,
    q_pos: Pos,
    k_pos: Pos,
    head_dim: int,
    length: Length,
    dtype: torch.dtype,
    device: torch.device,
) -> Tables:
    """Tables that turn every key to minus its distance, as the piece it lies in gives it."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
    ):  # kept tables may serve a training step later
        q, k = (torch.atleast_2d(as_tensor(pos, device)) for pos in (q_pos, k_pos))
        cos, sin = (torch.zeros((), dtype=dtype, device=device) for _ in range(2))
        for region, areas in pieces:
            plain, away = Region(frequencies=region.frequencies), region.q(q) - region.k(k)
            made = cos_sin(rope, plain, "pair", -away, head_dim, length, dtype=dtype, device=device)
            here = visible(areas, q, k)[:, None, :, None]
            cos, sin = torch.where(here, made[0], cos), torch.where(here, made[1], sin)
        return cos, sin


_made_once = Memo(_make, limit=2**26)
