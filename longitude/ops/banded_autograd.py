"""Bands of one softmax, one after the other, with exact gradients.

Each band starts from the output and log-sum-exp that stand so far. Every gradient is a band's own,
under the log-sum-exp of the whole. What lies far away is a tile of plain attention, and comes
first; where a bias goes flat, its log-sum-exp is shifted by one number a head. The table's
gradient needs nothing of that tile: a row's ds add up to nothing, so the last entry's gradient is
what the others (and a sink) lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.ops.aten import Operator, Ran, backward, forward
from longitude.ops.band import Band, Bias, Chunk, Part, Start, Way, reach_of
from longitude.ops.passes import Turn, some
from longitude.ops.tiles import Tile

# turned(turn, rows, columns): these rows of q and columns of k as that pass turns them
Turned = Callable[[int, slice, slice], tuple[Tensor, Tensor]]
Turns = tuple[Turn | None, ...]  # of every pass
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
        return Part(q, k, some(v, columns), bias, piece.band, self.scale, chunk=piece.chunk)


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
    ran = forward(far.operator, q, k, some(v, far.columns), far.causal, scale)
    lse = ran.lse.float() if bias is None else ran.lse.float() + bias.table[:, -1:]
    return Start(ran.out, lse, far.tile.top), ran.extra


def turning(plan: Plan, q: Tensor, k: Tensor, turns: Turns) -> Turned:
    """q and k turned when they are asked for: whole, and once, where several ask for one turn."""
    far = () if plan.far is None else (plan.far.turn,)
    asked = Counter([*far, *(piece.turn for piece in plan.pieces)])
    latest: dict[int, tuple[Tensor, Tensor]] = {}

    def turned(turn: int, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        how = turns[turn]
        if how is None:
            return some(q, rows), some(k, columns)
        if asked[turn] == 1:
            return how.cut(rows, columns).of(some(q, rows), some(k, columns))
        if turn not in latest:
            latest.clear()
            latest[turn] = how.of(q, k)
        return some(latest[turn][0], rows), some(latest[turn][1], columns)

    return turned


How = tuple[Way, Plan, Turns]


class Banded(torch.autograd.Function):
    """apply((way, plan, turns), q, k, v, table, ahead, sinks): every piece of a plan.

    What is turned is turned again for the gradients, which takes less than keeping it: q and k are
    kept as they came, however many turns there are.
    """

    @staticmethod
    def forward(ctx: Any, how: How, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
                ahead: Tensor | None, sinks: Tensor | None) -> Tensor:  # fmt: skip
        way, plan, turns = how
        bias = None if table is None else Bias(table, plan.first, ahead)
        made = chained(way, plan, turning(plan, q, k, turns), v, bias, sinks)
        ctx.how, ctx.extra, ctx.reaches = how, made.extra, made.reaches
        ctx.save_for_backward(q, k, v, table, sinks, made.out, made.lse)
        return made.out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (way, plan, turns), grad = ctx.how, grad_outputs[0]
        q, k, v, table, sinks, out, lse = ctx.saved_tensors
        turned = turning(plan, q, k, turns)
        bias = None if table is None else Bias(table, plan.first)
        added = _Sum((q, k, v), turns)
        wide = len(plan.pieces) > 1 or plan.far is not None
        d_table = torch.zeros_like(bias.table) if bias and ctx.needs_input_grad[4] else None
        for piece, reach in zip(plan.pieces, ctx.reaches, strict=True):
            part = plan.part(piece, turned, v, bias)._replace(reach=reach)
            made = way.backward(part, grad, out, lse, d_table is not None, wide)
            added.add(piece.turn, WHOLE, slice(*piece.columns), made[:3])
            d_table = d_table if d_table is None or made[3] is None else d_table + made[3]
        if plan.far is not None:
            whole = Ran(out, lse if table is None else lse - table[:, -1:], ctx.extra)
            made = _far_gradients(plan.far, plan.scale, turned, v, grad, whole)
            added.add(plan.far.turn, plan.far.rows, plan.far.columns, made)
        d_sinks = None if sinks is None else _of_sinks(sinks, grad, out, lse)
        if d_table is not None and plan.flat:
            d_table[:, -1] = -d_table[:, :-1].sum(1) - (0 if d_sinks is None else d_sinks)
        return None, *added.totals(), d_table, None, d_sinks


def _of_sinks(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """A sink's weight has no value: all it does is take from the others."""
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weight * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)


class _Sum:
    """Gradients of q, k and v that come in parts, each turned back as its part was turned."""

    def __init__(self, given: tuple[Tensor, ...], turns: Turns) -> None:
        self.given, self.turns = given, turns
        self.sums: list[Tensor | None] = [None] * len(given)

    def add(self, turn: int, rows: slice, columns: slice, made: Sequence[Tensor]) -> None:
        """Add those of some rows of q and columns of k and v."""
        how, (dq, dk, dv) = self.turns[turn], made
        if how is not None:
            dq, dk = how.cut(rows, columns).of(dq, dk, back=True)
        for n, (where, one) in enumerate(((rows, dq), (columns, dk), (columns, dv))):
            if self.sums[n] is None:
                if one.shape == self.given[n].shape:
                    self.sums[n] = one
                    continue
                wide = torch.promote_types(one.dtype, torch.float32)
                self.sums[n] = torch.zeros_like(self.given[n], dtype=wide)
            self.sums[n][:, :, where] += one  # type: ignore[index]

    def totals(self) -> list[Tensor]:
        """The sums, in the type of what they are gradients of."""
        return [
            torch.zeros_like(x) if found is None else found.to(x.dtype)
            for x, found in zip(self.given, self.sums, strict=True)
        ]


def _far_gradients(far: Far, scale: float, turned: Turned, v: Tensor, grad: Tensor,
                   whole: Ran) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The far tile's gradients, by its own backward under the whole softmax's log-sum-exp."""
    q, k = turned(far.turn, far.rows, far.columns)
    dout, out, lse = (some(x, far.rows) for x in (grad, whole.out, whole.lse))
    part = Ran(out, lse, whole.extra)
    return backward(far.operator, dout, q, k, some(v, far.columns), part, far.causal, scale)
