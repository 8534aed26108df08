"""Passes run tile by tile and merged exactly by their log-sum-exp (LSE), with exact gradients.

Two parts of one softmax merge as out = out₁ + σ(lse₂ - lse₁)(out₂ - out₁), lse = ln(e^lse₁ +
e^lse₂); a sink's logit is one more part, whose output is zero. The gradients are those of each
tile's own backward, called with the *merged* output and LSE: then e^(score - lse) is the weight in
the merged softmax. (Merging with detached weights would be off by tens of per cent.)

Tiles of one shape are stacked into a batch and run by one kernel call. On a GPU with Triton kernels
stack windows, merge several parts in one launch (`kernels.merge`) and sum the parts of a gradient
(`kernels.gradients`); `windows`, `MergeOneByOne` and `GradientSum` are their references.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.ops.extra_dims import values_for, with_sums
from longitude.ops.gpu_operators import GPU_OPERATORS, Causal, Forward, Operator, Three
from longitude.ops.inputs import AttentionInputs
from longitude.ops.kernels.launch import triton_available
from longitude.ops.passes import (
    MAX_TRIANGLE,
    Pass,
    Tile,
    Windows,
    accum_dtype,
    band_mask,
    batches,
    dense,
    evenly_spaced,
    make_passes,
    single_query_pass,
    sliced,
    spacings,
    windows,
)
from longitude.ops.plan import Kernel, Merge, Plan, lse_kernel
from longitude.parts.rope import Pairs, apply_rotary
from longitude.parts.rotary_tables import Tables

# a direct binding: through torch.ops a call with one token takes noticeably longer
cpu_flash: Any = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[attr-defined]
STRIP = 64  # rows of a small causal tile that a CPU runs in one call


def operator_for(q: Tensor) -> Operator | None:
    """Return the operator for this tensor's device, type and head size, or None."""
    kernel = lse_kernel(q.device.type, q.dtype, q.shape[-1])
    return None if kernel is None else OPERATORS[kernel]


def forward(op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Forward:
    """Run an operator over grouped heads."""
    result = in_groups(op, q, k, v, causal, scale)
    return Forward(result.out.flatten(1, 2), result.lse.flatten(1, 2), result.extra)


def in_groups(
    op: Operator, q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float
) -> Forward:
    """Like `forward`, as (b hkv g n d) and (b hkv g n) in the kernel's memory layout."""
    b, hkv = k.shape[:2]
    result = op.forward(*((q, k, v) if op.grouped else _group(q, k, v)), causal, scale)
    shape = (b, hkv, q.shape[1] // hkv, q.shape[2])
    return Forward(result.out.view(*shape, -1), result.lse.view(shape), result.extra)


def backward(op: Operator, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward,
             causal: Causal, scale: float) -> Three:  # fmt: skip
    """Return the gradients of q, k and v; keys sum the gradients of their group of heads."""
    if op.grouped:
        return op.backward(grad, q, k, v, ran, causal, scale)
    h, hkv = q.shape[1], k.shape[1]
    qg, kg, vg = _group(q, k, v)
    out, lse, grad = (
        x.contiguous().view(qg.shape[0], qg.shape[1], *x.shape[2:])
        for x in (ran.out, ran.lse, grad)
    )
    dq, dk, dv = op.backward(grad, qg, kg, vg, Forward(out, lse, ran.extra), causal, scale)
    if hkv != h:  # unless the kernel has summed the group itself
        dk, dv = (x if x.shape[1] == 1 else x.sum(1) for x in (dk, dv))
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _group(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """View (b hkv·g n d) and (b hkv m d) as (b·hkv g n d), keys expanded without a copy."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return q, k, v
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    return q.reshape(-1, group, *q.shape[2:]), k, v


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float) -> Forward:
    n, run = q.shape[2], cpu_flash
    small = STRIP < n <= MAX_TRIANGLE and torch.get_num_threads() <= q.shape[0] * q.shape[1]
    if not (causal and small):
        return Forward(*run(q, k, v, 0.0, causal, scale=scale))
    # the kernel would compute every pair; each strip of rows gets only the keys that it sees
    mask, strips = band_mask(STRIP, MAX_TRIANGLE + 2 * STRIP, q.dtype), []
    for top in range(0, n, STRIP):
        end, first = min(n, top + STRIP), MAX_TRIANGLE + STRIP - top
        seen = mask[:, :, : end - top, first : first + end]
        strip = (q[:, :, top:end], k[:, :, :end], v[:, :, :end])
        strips.append(run(*strip, 0.0, attn_mask=seen, scale=scale))
    out, lse = (torch.cat(x, 2) for x in zip(*strips, strict=True))
    return Forward(out, lse)


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, ran: Forward,
                  causal: Causal, scale: float) -> Three:  # fmt: skip
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, ran.out, ran.lse, 0.0, causal, scale=scale
    )


OPERATORS = {Kernel.CPU_FLASH: Operator(_cpu_forward, _cpu_backward), **GPU_OPERATORS}


def stacked(sources: list[Windows], flipped: bool) -> list[Tensor]:
    """Stack each source's windows as (t·b h size d), with rows in reverse order if flipped."""
    x, starts, _ = sources[0]
    copied = flipped or (x.shape[0] > 1 and len(starts) > 1)
    even = all(len(spacings(source.starts)) <= 1 for source in sources)
    if copied and even and triton_available(x.device):
        from longitude.ops.kernels.merge import stack  # deferred: it imports Triton

        return stack(sources, flipped)
    stacks = [windows(*source) for source in sources]
    return [(x.flip(3) if flipped else x).flatten(0, 1) for x in stacks]


class TileOutput(NamedTuple):
    """Outputs (t b hkv g n d) and log-sum-exps (t b hkv g n) of the rows from each of `tops`.

    If flipped, each window starts with its last row.
    """

    out: Tensor
    lse: Tensor
    tops: list[int]
    flipped: bool = False

    def evenly(self) -> Iterator[TileOutput]:
        """Yield itself, or each window by itself if they overlap or are unevenly spaced."""
        if evenly_spaced(self.tops, self.out.shape[4]):
            yield self
            return
        for n, top in enumerate(self.tops):
            yield TileOutput(self.out[n : n + 1], self.lse[n : n + 1], [top], self.flipped)


def merging_for(rows: Sequence[int], like: Tensor) -> Any:
    """Return the accumulator to merge tiles into: rows (b h n), with the last dimension and type of
    these values. It has the interface of `MergeOneByOne`."""
    if triton_available(like.device) and like.dtype != torch.float64:
        from longitude.ops.kernels.merge import MergeTogether  # deferred: it imports Triton

        return MergeTogether(rows, like)
    return MergeOneByOne(rows, like)


class MergeOneByOne:
    """Merges each part as it is added, in float32 at least. `result` returns the output in the
    values' type and its log-sum-exp, which are 0 and -inf in rows that no part covers."""

    def __init__(self, rows: Sequence[int], like: Tensor) -> None:
        self.dtype, wide = like.dtype, accum_dtype(like)
        self.out = torch.zeros(*rows, like.shape[-1], dtype=wide, device=like.device)
        self.lse = torch.full(rows, float("-inf"), dtype=wide, device=like.device)

    def add(self, part: TileOutput) -> None:
        for piece in part.evenly():
            out, lse = piece.out.flatten(2, 3), piece.lse.flatten(2, 3).to(self.lse.dtype)
            if piece.flipped:
                out, lse = out.flip(3), lse.flip(3)
            here = windows(self.out, piece.tops, out.shape[3])
            here_lse = windows(self.lse[..., None], piece.tops, out.shape[3])[..., 0]
            weight = torch.sigmoid(lse - here_lse)
            weight = weight.masked_fill(lse == float("-inf"), 0.0)  # also if both are -inf
            here.lerp_(out.to(self.out.dtype), weight[..., None])
            here_lse.copy_(torch.logaddexp(here_lse, lse))

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = self.out, self.lse
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * (self.lse - lse).exp()[..., None]
        return out.to(self.dtype), lse


def sink_gradients(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradients of sink logits: a sink has no value and only reduces other weights."""
    weight = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weight * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).to(sinks.dtype)


class GradientPart(NamedTuple):
    """Gradients (t b h size d) of the rows from each of `starts`, in reverse order if flipped; and
    the tables (b|1 1 n half) of all rows, if those were rotated."""

    x: Tensor
    starts: list[int]
    flipped: bool = False
    tables: Tables | None = None


class GradientSum:
    """Sums the parts of one tensor's gradient, each rotated back, in float32 at least, and rounds
    once. On a GPU a kernel sums them all at the end."""

    def __init__(self, like: Tensor, pairs: Pairs = "half") -> None:
        self.like, self.parts = like, list[GradientPart]()
        self.pairs: Pairs = pairs
        wait = triton_available(like.device) and like.dtype != torch.float64
        self.total = None if wait else torch.zeros_like(like, dtype=accum_dtype(like))

    def add(self, part: GradientPart) -> None:
        x, starts, flipped, tables = part
        size = x.shape[3]
        if not evenly_spaced(starts, size):
            for n, start in enumerate(starts):
                self.add(part._replace(x=x[n : n + 1], starts=[start]))
        elif self.total is None:
            self.parts.append(part)
        else:
            x = x.flip(3) if flipped else x
            if tables is not None:
                cos, sin = (windows(t, starts, size) for t in tables)
                pairs = zip(x.to(self.total.dtype), cos, -sin, strict=True)
                x = torch.stack([apply_rotary(*args, self.pairs) for args in pairs])
            windows(self.total, starts, size).add_(x)

    def result(self) -> Tensor:
        if self.total is not None:
            return self.total.to(self.like.dtype)
        part = self.parts[0] if len(self.parts) == 1 else None
        if part and part.x.shape[1:] == self.like.shape and part[2:] == (False, None):
            return part.x[0].to(self.like.dtype)  # there is nothing to sum
        from longitude.ops.kernels.gradients import add_up  # deferred: it imports Triton

        return add_up(self.parts, self.like, self.pairs)


class TileBatch(NamedTuple):
    """Tiles of one shape in one pass, beginning at these rows and columns of the call. The pass's
    rotated q and k begin at row `top` and column `left`."""

    operator: Operator
    first: int  # index of this pass's q among the tensors of all passes; its k follows
    shape: Tile
    rows: list[int]
    columns: list[int]
    top: int
    left: int

    @property
    def flipped(self) -> bool:
        return self.shape.kind == "upper"

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Any, ...]:
        """Return an operator's arguments: stacked rows of q and columns of k and v, reversed for
        upper triangles; then causal and scale."""
        kind = self.shape.kind
        causal: Causal = self.shape.window if kind == "window" else kind != "full"
        sources = [
            Windows(q, [row - self.top for row in self.rows], self.shape.height),
            Windows(k, [column - self.left for column in self.columns], self.shape.width),
            Windows(v, self.columns, self.shape.width),
        ]
        return *stacked(sources, self.flipped), causal, scale

    def band(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return output and LSE of a CPU's blocks along a band. Columns overlap and are not copied.
        Heads that share keys become more rows; blocks run head by head to reuse cached columns."""
        b, hkv, height, width = *k.shape[:2], self.shape.height, self.shape.width
        shape = (len(self.rows), b, hkv, q.shape[1] // hkv, height)
        q = windows(q, [row - self.top for row in self.rows], height)
        q = q.reshape(shape[0], b * hkv, -1, q.shape[-1])
        k = windows(k.flatten(0, 1)[None], [x - self.left for x in self.columns], width)[:, 0]
        v = windows(v.flatten(0, 1)[None], self.columns, width)[:, 0]
        by_head = (x.transpose(0, 1) for x in (q, k, v))
        mask = band_mask(height, width, q.dtype, shape[3])
        out, lse = cpu_flash(*by_head, 0.0, attn_mask=mask, scale=scale)
        return out.transpose(0, 1).view(*shape, -1), lse.transpose(0, 1).view(shape)


def run(p: AttentionInputs, plan: Plan) -> Tensor:
    """Compute attention over every tile of every step. Rows that no tile covers are zeros."""
    if not any(step.tiles for step in plan.steps):
        return p.zeros()
    if p.needs_grad:
        parts, rotated = tile_batches(p, plan)
        v = values_for(rotated[0], p.v) if plan.extra_dims else p.v
        size = (p.q.shape[2], p.scale)
        return _Merged.apply(parts, size, p.sink_logits, v, *rotated)  # type: ignore[no-any-return]
    merging = None
    for parts, qk in _by_pass(p, plan):  # a pass's q and k are freed before the next is rotated
        v = values_for(qk[0], p.v) if plan.extra_dims else p.v
        if plan.merge is Merge.NONE:
            q, k, v = dense(*qk, v)
            return forward(parts[0].operator, *parts[0].arguments(q, k, v, p.scale)).out
        merging = merging or merging_for(p.q.shape[:3], v)
        add_tiles(merging, parts, p.scale, v, qk)
        del qk
    assert merging is not None
    return merging.result(p.sink_logits)[0]  # type: ignore[no-any-return]


def tile_batches(p: AttentionInputs, plan: Plan) -> tuple[list[TileBatch], list[Tensor]]:
    """Return the tiles of a plan in batches, and the rotated q and k of each pass."""
    parts: list[TileBatch] = []
    rotated: list[Tensor] = []
    for of_pass, qk in _by_pass(p, plan):
        parts += [part._replace(first=len(rotated)) for part in of_pass]
        rotated += qk
    return parts, rotated


def _by_pass(p: AttentionInputs, plan: Plan) -> Iterator[tuple[list[TileBatch], list[Tensor]]]:
    """Yield the batches of tiles and the rotated q and k of one pass after another."""
    single = p.q.shape[2] == 1
    for n, each_pass in enumerate((single_query_pass(p),) if single else make_passes(p)):
        steps = [s for s in plan.steps if single or s.passes == (n,)]
        all_tiles = [t for s in steps for t in s.tiles]
        if not all_tiles:
            continue
        top, left = min(t.top for t in all_tiles), min(t.left for t in all_tiles)
        rows = slice(top, max(t.top + t.height for t in all_tiles))
        columns = slice(left, max(t.left + t.width for t in all_tiles))
        runs = [(OPERATORS[s.kernel], batch) for s in steps for batch in batches(s.tiles)]
        parts = [
            TileBatch(op, 0, batch[0], [t.top for t in batch], [t.left for t in batch], top, left)
            for op, batch in runs
        ]
        q, k = _rotated(each_pass, rows, columns)
        if plan.extra_dims:
            q, k = with_sums(p, q, k, rows, columns)
        yield parts, [q, k]
        del q, k


def _rotated(one: Pass, rows: slice, columns: slice) -> Sequence[Tensor]:
    """Return the rotated q and k. On a CPU they are rotated by one complex product, which reorders
    dimensions but leaves scores the same."""
    p, rotation = one.inputs, one.rotation(rows, columns)
    wide = p.q.dtype in (torch.float32, torch.float64) and p.q.device.type == "cpu"
    whole = rotation and rotation.pairs == "half" and 2 * rotation.q[0].shape[-1] == p.q.shape[-1]
    if rotation is None or not (whole and wide) or p.needs_grad:
        return one.rotated(rows, columns)
    both = (sliced(p.q, rows), rotation.q), (sliced(p.k, columns), rotation.k)
    rotated = (torch.complex(*x.chunk(2, -1)).mul_(torch.complex(*tables)) for x, tables in both)
    return [torch.view_as_real(x).flatten(-2) for x in rotated]


Sums = tuple[Tensor, Tensor, list[tuple[Any, ...]]]  # output, log-sum-exp, extras for backwards


def add_tiles(merging: Any, parts: list[TileBatch], scale: float, v: Tensor, qk: Sequence[Tensor],
              top: int = 0) -> list[tuple[Any, ...]]:  # fmt: skip
    """Run tiles, merge them into the rows from `top` on, and return what the backward needs."""
    v, *qk = dense(v, *qk)
    extras = []
    for part in parts:
        args, rows = (qk[part.first], qk[part.first + 1], v, scale), [top + r for r in part.rows]
        if part.shape.kind == "band":  # never with gradients
            merging.add(TileOutput(*part.band(*args), rows))
            continue
        result = in_groups(part.operator, *part.arguments(*args))
        out, lse = (x.unflatten(0, (len(part.rows), -1)) for x in (result.out, result.lse))
        merging.add(TileOutput(out, lse, rows, part.flipped))
        extras.append(result.extra)
    return extras


def tile_gradients(parts: list[TileBatch], scale: float, grad: Tensor, sums: Sums, v: Tensor,
                   qk: Sequence[Tensor]) -> list[Tensor]:  # fmt: skip
    """Return the gradients of v and of each rotated q and k, given the softmax's output and LSE."""
    (out, lse, extras), (v, *qk) = sums, dense(v, *qk)
    totals = [GradientSum(x) for x in (v, *qk)]
    for part, extra in zip(parts, extras, strict=True):
        first, height = part.first, part.shape.height
        dout, o = stacked([Windows(x, part.rows, height) for x in (grad, out)], part.flipped)
        (lses,) = stacked([Windows(lse[..., None], part.rows, height)], part.flipped)
        q, k, values, *how = part.arguments(qk[first], qk[first + 1], v, scale)
        grads = backward(part.operator, dout, q, k, values, Forward(o, lses[..., 0], extra), *how)
        dq, dk, dv = (x.unflatten(0, (len(part.rows), -1)) for x in grads)
        rows = [row - part.top for row in part.rows]
        columns = [column - part.left for column in part.columns]
        totals[1 + first].add(GradientPart(dq, rows, part.flipped))
        totals[2 + first].add(GradientPart(dk, columns, part.flipped))
        totals[0].add(GradientPart(dv, part.columns, part.flipped))
    return [total.result() for total in totals]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: list[TileBatch], size: tuple[int, float], sinks: Tensor | None,
                v: Tensor, *qk: Tensor) -> Tensor:  # fmt: skip
        rows, ctx.scale = size
        merging = merging_for((*qk[0].shape[:2], rows), v)
        ctx.parts, ctx.extras = parts, add_tiles(merging, parts, ctx.scale, v, qk)
        out, lse = merging.result(sinks)
        ctx.save_for_backward(v, out, lse, sinks, *qk)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad = grad_outputs[0]
        v, out, lse, sinks, *qk = ctx.saved_tensors
        grads = tile_gradients(ctx.parts, ctx.scale, grad, (out, lse, ctx.extras), v, qk)
        d_sinks = None if sinks is None else sink_gradients(sinks, grad, out, lse)
        return None, None, d_sinks, *grads
