"""From a scheme to passes: which turns of q and k attention needs, and where each holds.

A pass is ordinary attention over one turn of q and k, restricted to some areas; the passes of a
call are disjoint. Turning waits until a backend asks for the rows and columns it will use.

One query needs one pass: each key turned by its own distance to it, whatever its region.

This is how decoding runs every remap on plain attention: q stays unturned and key j turns to minus
the distance that its region gives the pair, so q·k sees that distance. The tables of one step are
made once and serve every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.core.part import Pos, QueryRows, Region, as_tensor
from longitude.core.region import Area, meet, visible
from longitude.core.scheme import Scheme
from longitude.ops.inputs import AttentionInputs, Length, factors
from longitude.ops.kernels.launch import usable
from longitude.parts.rope import Pairs, Rope, apply_rotary
from longitude.parts.rotary_tables import Memo, Tables, cos_sin


@dataclass(frozen=True, eq=False)
class Pass:
    """One turn of q and k, and the disjoint areas where it holds."""

    problem: AttentionInputs
    areas: tuple[Area, ...]
    region: Region | None = None

    def turned(self, rows: slice = slice(None), cols: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """These rows of q and columns of k, turned for this pass."""
        turn = self.turn(rows, cols)
        q, k = self.problem.q[:, :, rows], self.problem.k[:, :, cols]
        return (q, k) if turn is None else turn.of(q, k)

    def turn(self, rows: slice = slice(None), cols: slice = slice(None)) -> Turn | None:
        """How these rows of q and columns of k are turned, None where they stay as they are."""
        p = self.problem
        if self.region is None or p.scheme.rotary is None:
            return None
        q_pos, k_pos = _cut(p.q_pos, rows), _cut(p.k_pos, cols)
        rope, centre = p.scheme.rotary, _last(q_pos) if p.scheme.rotary.decay else 0.0
        q_length, k_length = _cut_length(p.q_length, rows), _cut_length(p.k_length, cols)
        how = (accum_dtype(p.q), p.q.device, centre)
        q_tables = k_tables = _tables(p, self.region, "q", q_pos, q_length, *how)
        if p.rides or not _alike(rope, self.region, (q_pos, q_length), (k_pos, k_length)):
            k_tables = _tables(p, self.region, "k", k_pos, k_length, *how)
        return Turn(q_tables, k_tables, rope.pairs)


class Turn(NamedTuple):
    """The tables that q and k turn by, a row a token."""

    q: Tables
    k: Tables
    pairs: Pairs

    def cut(self, rows: slice, cols: slice) -> Turn:
        """The same for some rows of q and columns of k."""
        (c, s), (kc, ks) = self.q, self.k
        of_k = (some(kc, cols), some(ks, cols))
        return Turn((some(c, rows), some(s, rows)), of_k, self.pairs)

    def of(self, q: Tensor, k: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
        """q and k turned (or turned back, which takes their gradients to those of what was turned):
        in one launch where kernels run, else each by itself."""
        if usable(q):
            from longitude.ops.kernels.rope import turned  # late: it imports Triton

            return turned(q, k, self.q, self.k, self.pairs, back=back)
        (c, s), (kc, ks) = self.q, self.k
        if back:
            s, ks = -s, -ks
        return apply_rotary(q, c, s, self.pairs), apply_rotary(k, kc, ks, self.pairs)


def make_passes(p: AttentionInputs) -> tuple[Pass, ...]:
    """The passes of a call."""
    rope = p.scheme.rotary
    rows = rope.query_rows(p.q_pos) if rope is not None else None
    return tuple(Pass(p, areas, region) for region, areas in region_areas(p.scheme, rows))


@lru_cache(maxsize=1024)
def region_areas(
    scheme: Scheme, rows: QueryRows | None
) -> tuple[tuple[Region | None, tuple[Area, ...]], ...]:
    """The regions of a scheme with the areas where its masks show them.

    Where frequencies change by rows, only those of queries at these positions.
    """
    if scheme.rotary is None:
        return ((None, scheme.areas()),)
    masks = [m.areas() for m in scheme.mask]
    if rows is not None:
        masks.append((Area(top=rows[0], bottom=rows[-1] + 1),))
    regions = scheme.rotary.regions(rows)
    found = [(region, meet(*masks, (region.where,))) for region in regions]
    return tuple((region, areas) for region, areas in found if areas)


def _tables(p: AttentionInputs, region: Region, side: str, pos: Pos, length: Length, dtype: torch.dtype,
            device: torch.device, centre: float) -> Tables:  # fmt: skip
    rope, size = p.scheme.rotary, p.q.shape[-1]
    assert rope is not None
    if side == "q" and p.rides:
        make = _carried if isinstance(length, Tensor) else _carried_once
        return make(p.scheme, region, pos, size, length, dtype, device, centre)
    return cos_sin(rope, region, side, pos, size, length, dtype=dtype, device=device, centre=centre)


def _carried(scheme: Scheme, region: Region, pos: Pos, size: int, length: Length,
             dtype: torch.dtype, device: torch.device, centre: float) -> Tables:  # fmt: skip
    """The tables of q, multiplied by the factors of ④."""
    assert scheme.rotary is not None
    how = {"dtype": torch.float64, "device": device, "centre": centre}
    cos, sin = cos_sin(scheme.rotary, region, "q", pos, size, length, **how)
    with torch.inference_mode(False), torch.no_grad():
        rows = torch.atleast_2d(as_tensor(pos, device))
        factor = factors(scheme, rows, None, {})[..., None]
        return (cos * factor).to(dtype), (sin * factor).to(dtype)


_carried_once = Memo(_carried, limit=2**26)


def _alike(rope: Rope, region: Region, q: tuple[Pos, Length], k: tuple[Pos, Length]) -> bool:
    """Whether queries and keys turn by the very same tables, which are then made and kept once."""
    (q_pos, length), (k_pos, k_length) = q, k
    same = isinstance(q_pos, range) and isinstance(k_pos, range) and q_pos == k_pos
    if not same or isinstance(length, Tensor) or isinstance(k_length, Tensor):
        return False
    gain = (region.frequencies or rope.frequencies).gain(length)
    return length == k_length and gain == 1.0 and region.q == region.k and rope.decay is None


def accum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def some(x: Tensor, part: slice) -> Tensor:
    """Some tokens of x: x itself where they are all, since a view takes its time too."""
    return x if part.start in (None, 0) and part.stop in (None, x.shape[2]) else x[:, :, part]


def _cut(pos: Pos, part: slice) -> Pos:
    return pos[part] if isinstance(pos, range) else pos[:, part]


def _cut_length(length: Length, part: slice) -> Length:
    return length[:, part] if isinstance(length, Tensor) and length.shape[1] > 1 else length


def _last(pos: Pos) -> float:
    if isinstance(pos, range):
        return float(pos[-1]) if pos else 0.0
    return float(pos.max()) if pos.numel() else 0.0


Pieces = tuple[tuple[Region, tuple[Area, ...]], ...]


def fold(p: AttentionInputs) -> Pass:
    """The single pass of a single query."""
    rope, passes = p.scheme.rotary, make_passes(p)
    if rope is None or len(passes) == 1:
        return passes[0]
    pieces = tuple((one.region, one.areas) for one in passes if one.region is not None)
    fixed = (
        isinstance(p.q_pos, range) and isinstance(p.k_pos, range) and isinstance(p.k_length, int)
    )
    make = _made_once if fixed and not torch.compiler.is_compiling() else _make
    size, dtype = p.k.shape[-1], accum_dtype(p.k)
    cos, sin = make(rope, pieces, p.q_pos, p.k_pos, size, p.k_length, dtype, p.k.device)
    turned = replace(p, k=apply_rotary(p.k, cos, sin, rope.pairs))
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
