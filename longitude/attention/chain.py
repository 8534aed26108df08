"""Bands of one softmax, one after the other, with exact gradients.

Each band starts from the output and log-sum-exp that stand so far. Every gradient is a band's own,
under the log-sum-exp of the whole. Where a bias goes flat, what lies beyond is a tile of plain
attention whose log-sum-exp is shifted by one number a head, and it comes first. The table's
gradient needs nothing of that tile: a row's ds add up to nothing, so the last entry's gradient is
what the others (and a sink) lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.attention.band import Band, Bias, Part, Start, Way, reach_of
from longitude.attention.operators import Operator, Ran, backward, forward
from longitude.attention.tiles import Tile


class Piece(NamedTuple):
    """A band of one pass: which turned q and k, which columns, and which pairs by their indices."""

    turn: int
    columns: tuple[int, int]
    band: Band


class Far(NamedTuple):
    """What lies beyond a flat bias's end, as one tile of plain attention."""

    tile: Tile
    operator: Operator


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call runs: its pieces, and the table's first distance and whether it ends flat."""

    scale: float
    pieces: tuple[Piece, ...]
    first: int
    flat: bool
    far: Far | None = None
    reached: bool = False  # whether keys too far away to weigh anything are left out

    def part(self, piece: Piece, v: Tensor, bias: Bias, qk: tuple[Tensor, ...]) -> Part:
        """A piece's tensors, its columns cut and its table counted from them."""
        left, right = piece.columns
        q, k = qk[2 * piece.turn : 2 * piece.turn + 2]
        bias = bias._replace(first=bias.first + left)
        return Part(q, k[:, :, left:right], v[:, :, left:right], bias, piece.band, self.scale)


class Banded(torch.autograd.Function):
    """apply(way, plan, v, table, ahead, sinks, q, k, q, k …): every piece of a plan."""

    @staticmethod
    def forward(ctx: Any, way: Way, plan: Plan, v: Tensor, table: Tensor, ahead: Tensor | None,
                sinks: Tensor | None, *qk: Tensor) -> Tensor:  # fmt: skip
        bias = Bias(table, plan.first, ahead)
        start, ran, parts = None, None, [plan.part(piece, v, bias, qk) for piece in plan.pieces]
        if plan.reached:
            parts = [part._replace(reach=reach_of(part)) for part in parts]
        if plan.far is not None:
            cut = _cut(plan.far.tile, qk[0], qk[1], v)
            ran = forward(plan.far.operator, *cut, *_kind(plan))
            start = Start(ran.out, ran.lse.float() + table[:, -1:], plan.far.tile.top)
        for left, part in zip(range(len(parts))[::-1], parts, strict=True):
            start = Start(*way.forward(part, start, left > 0))
        assert start is not None
        out, lse = start.out, start.lse
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = (out * (lse - total).exp()[..., None]).to(v.dtype), total
        ctx.way, ctx.plan, ctx.extra = way, plan, () if ran is None else ran.extra
        ctx.reaches = [part.reach for part in parts]
        ctx.save_for_backward(v, table, sinks, out, lse, *qk)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        plan, grad = ctx.plan, grad_outputs[0]
        v, table, sinks, out, lse, *qk = ctx.saved_tensors
        whole, bias = Ran(out, lse, ctx.extra), Bias(table, plan.first)
        added = _Sum([v, *qk], alone=len(plan.pieces) == 1 and plan.far is None)
        d_table = torch.zeros_like(table) if ctx.needs_input_grad[3] else None
        for piece, reach in zip(plan.pieces, ctx.reaches, strict=True):
            part = plan.part(piece, v, bias, tuple(qk))._replace(reach=reach)
            made = ctx.way.backward(part, grad, out, lse, d_table is not None, not added.alone)
            rows, columns = slice(None), slice(*piece.columns)
            added.add(piece.turn, rows, columns, made[:3])
            d_table = d_table if d_table is None or made[3] is None else d_table + made[3]
        if plan.far is not None:
            _add_far(added, plan, grad, (*qk, v), whole, table)
        d_sinks = None if sinks is None else _of_sinks(sinks, grad, out, lse)
        if d_table is not None and plan.flat:
            d_table[:, -1] = -d_table[:, :-1].sum(1) - (0 if d_sinks is None else d_sinks)
        totals = [added.total(n) for n in range(1 + len(qk))]
        return None, None, totals[0], d_table, None, d_sinks, *totals[1:]


def _of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """A sink's weight has no value: all it does is take from the others."""
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weight * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)


class _Sum:
    """Gradients that come in parts: in their own type where there is one part alone."""

    def __init__(self, given: list[Tensor], alone: bool) -> None:
        self.given, self.alone = given, alone
        self.sums: list[Tensor | None] = [None] * len(given)

    def add(self, turn: int, rows: slice, columns: slice, made: Any) -> None:
        """Add those of some rows of q and columns of k and v."""
        for n, where, one in zip((1 + 2 * turn, 2 + 2 * turn, 0), (rows, columns, columns), made,
                                 strict=True):  # fmt: skip
            if self.sums[n] is None:
                wide = torch.promote_types(one.dtype, torch.float32)
                whole = one.shape == self.given[n].shape
                self.sums[n] = one if whole else torch.zeros_like(self.given[n], dtype=wide)
                if whole:
                    continue
            self.sums[n][:, :, where] += one  # type: ignore[index]

    def total(self, n: int) -> Tensor | None:
        found = self.sums[n]
        return torch.zeros_like(self.given[n]) if found is None else found.to(self.given[n].dtype)


def _cut(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's rows of q and columns of k and v."""
    rows, columns = _sides(tile)
    return q[:, :, rows], k[:, :, columns], v[:, :, columns]


def _sides(tile: Tile) -> tuple[slice, slice]:
    return slice(tile.top, tile.top + tile.height), slice(tile.left, tile.left + tile.width)


def _kind(plan: Plan) -> tuple[bool, float]:
    """Whether the far tile is causal, and the scale: what plain kernels take."""
    assert plan.far is not None
    return plan.far.tile.kind == "lower", plan.scale


def _add_far(added: _Sum, plan: Plan, grad: Tensor, qkv: tuple[Tensor, ...], whole: Ran,
             table: Tensor) -> None:  # fmt: skip
    """The far tile's gradients, by its own backward under the whole softmax's log-sum-exp."""
    assert plan.far is not None
    rows, columns = _sides(plan.far.tile)
    part = Ran(
        whole.out[:, :, rows].contiguous(),
        (whole.lse[:, :, rows] - table[:, -1:]).contiguous(),
        whole.extra,
    )
    dout = grad[:, :, rows].contiguous()
    made = backward(plan.far.operator, dout, *_cut(plan.far.tile, *qkv), part, *_kind(plan))
    added.add(0, rows, columns, made)
