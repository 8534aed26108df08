"""Passes run tile by tile and merged exactly by their log-sum-exp, with exact gradients.

The gradient of the whole is each tile's own backward, called with the *merged* output and
log-sum-exp: then e^(score - lse) is the weight in the merged softmax. (Merging with detached
weights would be wrong by tens of per cent.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longitude.ops.aten import Operator, Ran, backward, in_groups
from longitude.ops.gather_windows import Windows, evenly_apart, stacked, windows
from longitude.ops.lse_join import Part, joining
from longitude.ops.tiles import Tile, batches


@dataclass(frozen=True)
class Plan:
    """The kernel, its scale, and for each turned (q, k) the batches of tiles to run on it."""

    operator: Operator
    scale: float
    passes: tuple[tuple[tuple[Tile, ...], ...], ...]

    @classmethod
    def of(cls, operator: Operator, scale: float, passes: list[list[Tile]]) -> Plan:
        made = tuple(tuple(tuple(batch) for batch in batches(found)) for found in passes)
        return cls(operator, scale, made)


@dataclass(frozen=True)
class Box:
    """Where one pass's turned q and k lie in the whole call: its first row and column."""

    top: int
    left: int


def merged(plan: Plan, boxes: list[Box], v: Tensor, turned: list[tuple[Tensor, Tensor]],
           rows: int, sink_logits: Tensor | None) -> Tensor:  # fmt: skip
    """Attention over every tile of every pass. Rows that no tile covers come out as zeros."""
    flat = [_dense(x) for pair in turned for x in pair]
    return _Merged.apply(plan, boxes, rows, sink_logits, _dense(v), *flat)  # type: ignore[no-any-return]


def _dense(x: Tensor) -> Tensor:
    """Kernels read the last dimension as contiguous, without asking."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        boxes: list[Box],
        rows: int,
        sinks: Tensor | None,
        v: Tensor,
        *qk: Tensor,
    ) -> Tensor:
        b, h = qk[0].shape[:2]
        joined, extras = joining((b, h, rows), v), []
        for n, batch, box in _runs(plan, boxes):
            part, extra = _forward(plan, batch, box, qk[2 * n], qk[2 * n + 1], v)
            joined.add(part)
            extras.append(extra)
        out, lse = joined.result(sinks)
        ctx.plan, ctx.boxes, ctx.extras = plan, boxes, extras
        ctx.save_for_backward(v, out, lse, sinks, *qk)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad = grad_outputs[0]
        v, out, lse, sinks, *qk = ctx.saved_tensors
        grads = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (v, *qk)
        ]
        for (n, batch, box), extra in zip(_runs(ctx.plan, ctx.boxes), ctx.extras, strict=True):
            q, k = qk[2 * n], qk[2 * n + 1]
            dq, dk, dv = _backward(ctx.plan, batch, box, q, k, v, grad, Ran(out, lse, extra))
            _add(grads[1 + 2 * n], dq, [t.top for t in batch])
            _add(grads[2 + 2 * n], dk, [t.left for t in batch])
            _add(grads[0], dv, [t.left + box.left for t in batch])
        d_sinks = None
        if sinks is not None:
            weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
            d_sinks = -(weight * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        given = [g.to(x.dtype) for g, x in zip(grads, (v, *qk), strict=True)]
        return None, None, None, d_sinks, *given


def _runs(plan: Plan, boxes: list[Box]) -> Iterator[tuple[int, tuple[Tile, ...], Box]]:
    """Every batch of tiles, with the number of its pass and where that lies."""
    for n, (found, box) in enumerate(zip(plan.passes, boxes, strict=True)):
        for batch in found:
            yield n, batch, box


def _tiles_of(batch: tuple[Tile, ...], box: Box, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The batch's rows of q and columns of k and v, stacked; upper triangles reversed."""
    first, lefts = batch[0], [t.left for t in batch]
    sources = [
        Windows(q, [t.top for t in batch], first.height),
        Windows(k, lefts, first.width),
        Windows(v, [left + box.left for left in lefts], first.width),
    ]
    return stacked(sources, first.kind == "upper")


def _forward(
    plan: Plan, batch: tuple[Tile, ...], box: Box, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Part, tuple[Any, ...]]:
    """A batch's outputs with the rows they belong to, and what its backward needs."""
    first, (q, k, v) = batch[0], _tiles_of(batch, box, q, k, v)
    ran = in_groups(plan.operator, q, k, v, first.kind != "full", plan.scale)
    out, lse = (x.unflatten(0, (len(batch), -1)) for x in (ran.out, ran.lse))
    return Part(out, lse, [t.top + box.top for t in batch], first.kind == "upper"), ran.extra


def _backward(plan: Plan, batch: tuple[Tile, ...], box: Box, q: Tensor, k: Tensor, v: Tensor,
              grad: Tensor, whole: Ran) -> list[Tensor]:  # fmt: skip
    """A batch's gradients (t b h n d), from the merged output and log-sum-exp."""
    first, tops = batch[0], [t.top + box.top for t in batch]
    flipped, causal = first.kind == "upper", first.kind != "full"
    dout, out = stacked([Windows(x, tops, first.height) for x in (grad, whole.out)], flipped)
    (lse,) = stacked([Windows(whole.lse[..., None], tops, first.height)], flipped)
    ran = Ran(out, lse[..., 0], whole.extra)
    q, k, v = _tiles_of(batch, box, q, k, v)
    made = backward(plan.operator, dout, q, k, v, ran, causal, plan.scale)
    found = [x.unflatten(0, (len(batch), -1)) for x in made]
    return [x.flip(3) for x in found] if flipped else found


def _add(total: Tensor, parts: Tensor, starts: list[int]) -> None:
    size = parts.shape[3]
    if evenly_apart(starts, size):
        windows(total, starts, size).add_(parts)
        return
    for start, one in zip(starts, parts, strict=True):
        total[:, :, start : start + size].add_(one)
