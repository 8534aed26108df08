"""Tiles of one softmax: windows copied into batches, and their outputs merged, each in one launch.

`stack` copies windows of several tensors, with their rows in reverse if requested. It copies whole
rows of queries, keys and values together, at the speed of a copy. `merge` computes
out = Σ e^(lse_p - lse) out_p, lse = ln Σ e^(lse_p). A part covers evenly spaced windows of rows, or
a single one. The kernel computes which window a row lies in and its index there (counted from the
bottom if the tile ran reversed), so parts are read in the layout their kernel wrote. Each element
is read once and written once, in the output's dtype. If there are more parts than one launch takes,
a running result in float32 is merged as well. References: `lse_merge.windows` and
`lse_merge.MergeOneByOne`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from longitude.ops.kernels.launch import require
from longitude.ops.lse_merge import TileOutput
from longitude.ops.passes import Windows, dense

LOG2E = tl.constexpr(math.log2(math.e))
MAX_PARTS = 8  # per launch: leaky ReRoPE has three, dual chunk six or seven


class Blocks(NamedTuple):
    """Rows per program, all of one head or window, and warps per program."""

    rows: int
    warps: int


@triton.jit
@no_type_check
def _stack_kernel(sources, batch, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                  FLIPPED: tl.constexpr):  # fmt: skip
    """Copy a block of rows of one window. Programs are numbered source after source."""
    program = tl.program_id(0)
    for n in tl.static_range(len(sources)):
        x, out, heads, size, blocks, begin, end, first, step, xb, xh, xn = sources[n]
        if (program >= begin) & (program < end):
            lane = ((program - begin) // blocks).to(tl.int64)  # of (t b h), in memory's order
            head, sequence, tile = lane % heads, (lane // heads) % batch, lane // heads // batch
            row = ((program - begin) % blocks) * ROWS + tl.arange(0, ROWS)
            column = tl.arange(0, WIDTH)[None, :]
            mask = (row < size)[:, None] & (column < D)
            from_row = size - 1 - row if FLIPPED else row
            source = x + sequence * xb + head * xh + (first + tile * step + from_row)[:, None] * xn
            values = tl.load(source + column, mask=mask)
            pointers = out + (lane * size + row)[:, None] * D + column
            tl.store(pointers, values, mask=mask)


def stack(sources: list[Windows], flipped: bool, *, blocks: Blocks | None = None) -> list[Tensor]:
    """Each source's windows as (t·b h size d), contiguous. Starts are evenly spaced, ascending or
    descending, and windows may overlap."""
    require(sources[0].x)
    xs = dense(*(source.x for source in sources))
    outs = [
        x.new_empty(len(starts) * x.shape[0], x.shape[1], size, x.shape[3])
        for x, (_, starts, size) in zip(xs, sources, strict=True)
    ]
    (b, _, _, d), end, args = xs[0].shape, 0, []
    blocks = blocks or blocks_for(d, 4096)
    for x, out, (_, starts, size) in zip(xs, outs, sources, strict=True):
        begin, runs = end, triton.cdiv(size, blocks.rows)
        end += out.shape[0] * out.shape[1] * runs
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        args.append((x, out, x.shape[1], size, runs, begin, end, starts[0], step, *x.stride()[:3]))
    if end and d:
        kernel: Any = _stack_kernel[(end,)]
        with torch.cuda.device_of(xs[0]):
            kernel(tuple(args), b, d, triton.next_power_of_2(d), blocks.rows, flipped,
                   num_warps=blocks.warps, enable_fp_fusion=True)  # fmt: skip
    return outs


@triton.jit
@no_type_check
def _merge_kernel(parts, so_far, so_far_lse, sinks, out, lse, first, last, heads, rows, ob, oh, on,
                  blocks, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                  RUNNING: tl.constexpr, SINK: tl.constexpr):  # fmt: skip
    """Merge rows first … last-1 of each head. The running result is contiguous (b h rows d)."""
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = lane // heads, lane % heads
    begin = first + (tl.program_id(0) % blocks) * ROWS
    row = begin + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    valid, in_head = row < last, column < D
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    if SINK:  # a sink is a part whose output is zero
        peak = total + tl.load(sinks + head).to(tl.float32)
        total = tl.where(peak > float("-inf"), 1.0, 0.0)
    if RUNNING:
        at = lane * rows + row
        x = tl.load(so_far + at[:, None] * D + column, mask=valid[:, None] & in_head, other=0.0)
        weight = tl.load(so_far_lse + at, mask=valid, other=float("-inf"))
        peak, total, mixed = _joined(peak, total, mixed, x, weight)
    for n in tl.static_range(len(parts)):  # parts of other rows are not even read
        start, step, count, height = parts[n][2], parts[n][3], parts[n][4], parts[n][5]
        if (begin + ROWS > start) & (begin < start + step * (count - 1) + height):
            x, weight = _read(parts[n], batch, head, row, column, valid, in_head)
            peak, total, mixed = _joined(peak, total, mixed, x, weight)
    total = tl.where(total > 0, total, 1.0)  # in uncovered rows peak is -inf, mixed is 0
    pointers = out + batch * ob + head * oh + row.to(tl.int64)[:, None] * on + column
    tl.store(pointers, mixed / total[:, None], mask=valid[:, None] & in_head)
    tl.store(lse + lane * rows + row, peak + tl.log(total), mask=valid)


@triton.jit
@no_type_check
def _read(part, batch, head, row, column, here, wide):
    """A part's output and log-sum-exp for these rows; -inf for rows that it does not cover."""
    x, lse, start, step, count, height, flipped, group, xt, xb, xk, xg, xn, lt, lb, lk, lg, ln = (
        part
    )
    offset = row - start
    tile = offset // step
    within = offset - tile * step
    covered = here & (offset >= 0) & (tile < count) & (within < height)
    within = tl.where(flipped != 0, height - 1 - within, within).to(tl.int64)
    tile, kv, member = tile.to(tl.int64), head // group, head % group
    at = batch * lb + kv * lk + member * lg + tile * lt + within * ln
    weight = tl.load(lse + at, mask=covered, other=float("-inf")).to(tl.float32)
    at = batch * xb + kv * xk + member * xg + tile * xt + within * xn
    values = tl.load(x + at[:, None] + column, mask=covered[:, None] & wide, other=0.0)
    return values.to(tl.float32), weight


@triton.jit
@no_type_check
def _joined(peak, total, mixed, x, weight):
    """Merge one more part, with old and new weights relative to the larger log-sum-exp."""
    higher = tl.maximum(peak, weight)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp(peak - base), tl.exp(weight - base)
    return higher, total * old + new, mixed * old[:, None] + x * new[:, None]


Running = tuple[Tensor, Tensor]  # contiguous (b h n d) and (b h n) in float32


def merge(
    parts: list[TileOutput],
    out: Tensor,
    lse: Tensor,
    *,
    span: tuple[int, int] | None = None,
    running: Running | None = None,
    sinks: Tensor | None = None,
    blocks: Blocks | None = None,
) -> None:
    """Merge the parts, the running result and sinks (h) into out (b h n d) and lse (b h n).

    Only the rows of `span` are written. lse and each row of out are contiguous; both may be the
    running result itself. Rows that no part covers get zeros, and a log-sum-exp of -inf.
    """
    require(out)
    (b, h, n, d), (first, last) = out.shape, span or (0, out.shape[2])
    blocks = blocks or blocks_for(d)
    runs = triton.cdiv(last - first, blocks.rows)
    if not b * h * runs * d:
        return
    args = tuple(_numbers(part) for part in parts)
    kernel: Any = _merge_kernel[(b * h * runs,)]
    with torch.cuda.device_of(out):
        kernel(args, *(running or (out, lse)), lse if sinks is None else sinks, out, lse, first,
               last, h, n, *out.stride()[:3], runs, d, triton.next_power_of_2(d), blocks.rows,
               running is not None, sinks is not None, num_warps=blocks.warps,
               enable_fp_fusion=True)  # fmt: skip


def _numbers(part: TileOutput) -> tuple[Any, ...]:
    """A part as the kernel reads it: pointers, positions of its windows, and strides."""
    (x,), tops = dense(part.out), part.tops
    height, group = x.shape[4], x.shape[3]
    step = tops[1] - tops[0] if len(tops) > 1 else height
    place = (tops[0], step, len(tops), height, int(part.flipped), group)
    return x, part.lse, *place, *x.stride()[:5], *part.lse.stride()


@triton.jit(do_not_specialize=("splits", "total_rows", "per_head", "heads"))
@no_type_check
def merge_shares_kernel(parts, sinks, out, splits, total_rows, per_head, heads, SINKS: tl.constexpr,
           DV: tl.constexpr, DV_PAD: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Merge the parts of one query's softmax. A sink's logit is one more, whose value is zero."""
    row = tl.program_id(0).to(tl.int64)
    lses = parts + total_rows.to(tl.int64) * splits * DV
    column, part = tl.arange(0, DV_PAD), tl.arange(0, S)
    top = tl.full((), float("-inf"), tl.float32)
    norm = tl.zeros((), tl.float32)
    acc = tl.zeros((DV_PAD,), tl.float32)
    if SINKS:
        top = tl.load(sinks + row // per_head % heads).to(tl.float32) * LOG2E
        norm += 1.0
    for first in range(0, splits, S):
        at, valid = (first + part) * total_rows + row, first + part < splits
        lse = tl.load(lses + at, mask=valid, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, rescale = tl.exp2(lse - base), tl.exp2(top - base)
        mask = (lse > float("-inf"))[:, None] & (column < DV)[None, :]  # else unwritten
        values = tl.load(parts + at[:, None] * DV + column[None, :], mask=mask, other=0.0)
        acc = acc * rescale + tl.sum(values * weight[:, None], 0)
        norm, top = norm * rescale + tl.sum(weight, 0), new_top
    acc = acc / tl.where(norm > 0, norm, 1.0)
    tl.store(out + row * DV + column, acc.to(out.dtype.element_ty), mask=column < DV)


def blocks_for(d: int, numbers: int = 2048) -> Blocks:
    """`numbers` elements for four warps: more of each of four parts would exceed the registers."""
    return Blocks(max(1, min(64, numbers // triton.next_power_of_2(max(d, 1)))), 4)


class MergeTogether:
    """Collect parts, and merge up to MAX_PARTS of them in each launch."""

    def __init__(self, rows: Sequence[int], like: Tensor) -> None:
        self.rows, self.like = rows, like
        self.waiting: list[TileOutput] = []
        self.running: Running | None = None

    def add(self, part: TileOutput) -> None:
        for tile in part.evenly():
            if len(self.waiting) == MAX_PARTS:
                self._settle()
            self.waiting.append(tile)

    def _settle(self) -> None:
        """Merge the waiting parts into the rows they cover; the first time, into all rows."""
        if self.running is None:
            out = self.like.new_empty(*self.rows, self.like.shape[-1], dtype=torch.float32)
            self.running = out, out.new_empty(self.rows)
            merge(self.waiting, *self.running)
        else:
            ends = [part.tops[-1] + part.out.shape[4] for part in self.waiting]
            span = min(part.tops[0] for part in self.waiting), max(ends)
            merge(self.waiting, *self.running, span=span, running=self.running)
        self.waiting = []

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        b, h, n = self.rows  # tokens before heads in memory, as plain attention returns them
        out = self.like.new_empty(b, n, h, self.like.shape[-1]).transpose(1, 2)
        lse = self.like.new_empty(self.rows, dtype=torch.float32)
        merge(self.waiting, out, lse, running=self.running, sinks=sinks)
        return out, lse
