"""Bands of one softmax, one after the other, with exact gradients.

Each band starts from the output and log-sum-exp that stand so far. Every gradient is a band's own,
under the log-sum-exp of the whole. What lies far away is a tile of plain attention, and comes
first; where a bias goes flat, its log-sum-exp is shifted by one number a head. The table's
gradient needs nothing of that tile: a row's ds add up to nothing, so the last entry's gradient is
what the others (and a sink) lack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.attention.band import Band, Bias, Chunk, Part, Start, Way, reach_of
from longitude.attention.operators import Operator, Ran, backward, forward
from longitude.attention.tiles import Tile

# turned(turn, rows, columns): these rows of q and columns of k as that pass turns them
Turned = Callable[[int, slice, slice], tuple[Tensor, Tensor]]
WHOLE = slice(None)


class Piece(NamedTuple):
    """A band of one pass: which turned q and k, which columns, and which pairs by their indices."""

    turn: int
    columns: tuple[int, int]
    band: Band
    chunk: Chunk | None = None


class Far(NamedTuple):
    """What lies beyond every band as one tile of plain attention: which turned q and k, where."""

    turn: int
    tile: Tile
    operator: Operator

    @property
    def rows(self) -> slice:
        return slice(self.tile.top, self.tile.top + self.tile.height)

    @property
    def columns(self) -> slice:
        return slice(self.tile.left, self.tile.left + self.tile.width)

    @property
    def causal(self) -> bool:
        return self.tile.kind == "lower"


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call runs: its pieces, and the table's first distance and whether it ends flat."""

    scale: float
    pieces: tuple[Piece, ...]
    first: int = 0
    flat: bool = False
    far: Far | None = None
    reached: bool = False  # whether keys too far away to weigh anything are left out
    bands: Plan | None = None  # the same without a far tile, where there is one

    def part(self, piece: Piece, turned: Turned, v: Tensor, bias: Bias | None) -> Part:
        """A piece's tensors, its columns cut and its table counted from them."""
        columns = slice(*piece.columns)
        q, k = turned(piece.turn, WHOLE, columns)
        bias = bias and bias._replace(first=bias.first + columns.start)
        return Part(q, k, v[:, :, columns], bias, piece.band, self.scale, chunk=piece.chunk)


class Made(NamedTuple):
    """The output, its log-sum-exp, what the far tile's backward needs, how far pieces reached."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...]
    reaches: list[Tensor | None]


def chained(way: Way, plan: Plan, turned: Turned, v: Tensor, bias: Bias | None,
            sinks: Tensor | None) -> Made:  # fmt: skip
    """Every piece of a plan, in turn. What a piece has read is let go before the next is turned."""
    start, extra, reaches = None, (), []
    if plan.far is not None:
        start, extra = _far(plan.far, plan.scale, turned, v, bias)
    for piece in plan.pieces:
        part = plan.part(piece, turned, v, bias)
        if plan.reached:
            part = part._replace(reach=reach_of(part))
        reaches.append(part.reach)
        start = Start(*way.forward(part, start))
        del part
    assert start is not None
    out, lse = start.out, start.lse
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out, lse = (out * (lse - total).exp()[..., None]).to(v.dtype), total
    return Made(out, lse, extra, reaches)


def _far(far: Far, scale: float, turned: Turned, v: Tensor, bias: Bias | None) -> Any:
    """The softmax that the bands start from, and what its backward needs."""
    q, k = turned(far.turn, far.rows, far.columns)
    ran = forward(far.operator, q, k, v[:, :, far.columns], far.causal, scale)
    lse = ran.lse.float() if bias is None else ran.lse.float() + bias.table[:, -1:]
    return Start(ran.out, lse, far.tile.top), ran.extra


def _given(qk: tuple[Tensor, ...]) -> Turned:
    """Of tensors that are turned already."""
    return lambda turn, rows, columns: (qk[2 * turn][:, :, rows], qk[2 * turn + 1][:, :, columns])


class Banded(torch.autograd.Function):
    """apply(way, plan, v, table, ahead, sinks, q, k, q, k …): every piece of a plan."""

    @staticmethod
    def forward(ctx: Any, way: Way, plan: Plan, v: Tensor, table: Tensor | None,
                ahead: Tensor | None, sinks: Tensor | None, *qk: Tensor) -> Tensor:  # fmt: skip
        bias = None if table is None else Bias(table, plan.first, ahead)
        made = chained(way, plan, _given(qk), v, bias, sinks)
        ctx.way, ctx.plan, ctx.extra, ctx.reaches = way, plan, made.extra, made.reaches
        ctx.save_for_backward(v, table, sinks, made.out, made.lse, *qk)
        return made.out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        plan, grad = ctx.plan, grad_outputs[0]
        v, table, sinks, out, lse, *qk = ctx.saved_tensors
        bias = None if table is None else Bias(table, plan.first)
        added = _Sum([v, *qk], alone=len(plan.pieces) == 1 and plan.far is None)
        d_table = torch.zeros_like(bias.table) if bias and ctx.needs_input_grad[3] else None
        for piece, reach in zip(plan.pieces, ctx.reaches, strict=True):
            part = plan.part(piece, _given(tuple(qk)), v, bias)._replace(reach=reach)
            made = ctx.way.backward(part, grad, out, lse, d_table is not None, not added.alone)
            added.add(piece.turn, WHOLE, slice(*piece.columns), made[:3])
            d_table = d_table if d_table is None or made[3] is None else d_table + made[3]
        if plan.far is not None:
            whole = Ran(out, lse if table is None else lse - table[:, -1:], ctx.extra)
            _add_far(added, plan.far, plan.scale, grad, tuple(qk), v, whole)
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


def _add_far(added: _Sum, far: Far, scale: float, grad: Tensor, qk: tuple[Tensor, ...], v: Tensor,
             whole: Ran) -> None:  # fmt: skip
    """The far tile's gradients, by its own backward under the whole softmax's log-sum-exp."""
    q, k = _given(qk)(far.turn, far.rows, far.columns)
    dout, out, lse = (x[:, :, far.rows].contiguous() for x in (grad, whole.out, whole.lse))
    part = Ran(out, lse, whole.extra)
    made = backward(far.operator, dout, q, k, v[:, :, far.columns], part, far.causal, scale)
    added.add(far.turn, far.rows, far.columns, made)
