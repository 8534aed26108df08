"""Tiles of one softmax: windows copied into batches, and their outputs merged, each in one launch.

`stack` copies windows of several tensors, their rows in reverse where asked: rows move whole, at
the speed of a copy, queries, keys and values together. `merge` computes out = Σ e^(lse_p - lse)
out_p, lse = ln Σ e^(lse_p): a part covers windows of rows evenly spaced, or a single one; which
window a row lies in, and which of its rows it is (counted from the bottom where a tile ran
reversed), is worked out here, so parts are read where and how their kernel left them. Each number
is read once and written once, in the output's own type; a running result in float32 takes part
where there are more parts than one launch takes. References: `lse_merge.windows` and
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
MAX_PARTS = 8  # that one launch merges: leaky ReRoPE has three, dual chunk six or seven


class Blocks(NamedTuple):
    """What one program takes: some rows of one head or window, by so many warps."""

    rows: int
    warps: int


@triton.jit
@no_type_check
def _stack_kernel(sources, batch, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                  FLIPPED: tl.constexpr):  # fmt: skip
    """The programs of each source follow those of the one before."""
    program = tl.program_id(0)
    for n in tl.static_range(len(sources)):
        x, out, heads, size, blocks, begin, end, first, step, xb, xh, xn = sources[n]
        if (program >= begin) & (program < end):
            lane = ((program - begin) // blocks).to(tl.int64)  # of (t b h), in memory's order
            head, one, tile = lane % heads, (lane // heads) % batch, lane // heads // batch
            row = ((program - begin) % blocks) * ROWS + tl.arange(0, ROWS)
            column = tl.arange(0, WIDTH)[None, :]
            here = (row < size)[:, None] & (column < D)
            from_row = size - 1 - row if FLIPPED else row
            source = x + one * xb + head * xh + (first + tile * step + from_row)[:, None] * xn
            found = tl.load(source + column, mask=here)
            to = out + (lane * size + row)[:, None] * D + column
            tl.store(to, found, mask=here)


def stack(sources: list[Windows], flipped: bool, *, blocks: Blocks | None = None) -> list[Tensor]:
    """Each source's windows as (t·b h size d), contiguous; starts are evenly spaced, in any order,
    and windows may overlap."""
    require(sources[0].x)
    xs = dense(*(source.x for source in sources))
    outs = [
        x.new_empty(len(starts) * x.shape[0], x.shape[1], size, x.shape[3])
        for x, (_, starts, size) in zip(xs, sources, strict=True)
    ]
    (b, _, _, d), end, given = xs[0].shape, 0, []
    blocks = blocks or blocks_for(d, 4096)
    for x, out, (_, starts, size) in zip(xs, outs, sources, strict=True):
        begin, runs = end, triton.cdiv(size, blocks.rows)
        end += out.shape[0] * out.shape[1] * runs
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        given.append((x, out, x.shape[1], size, runs, begin, end, starts[0], step, *x.stride()[:3]))
    if end and d:
        kernel: Any = _stack_kernel[(end,)]
        with torch.cuda.device_of(xs[0]):
            kernel(tuple(given), b, d, triton.next_power_of_2(d), blocks.rows, flipped,
                   num_warps=blocks.warps, enable_fp_fusion=True)  # fmt: skip
    return outs


@triton.jit
@no_type_check
def _merge_kernel(parts, so_far, so_far_lse, sinks, out, lse, first, last, heads, rows, ob, oh, on,
                  blocks, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                  RUNNING: tl.constexpr, SINK: tl.constexpr):  # fmt: skip
    """Rows first … last-1 of each head; what has run so far is contiguous (b h rows d)."""
    lane = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = lane // heads, lane % heads
    begin = first + (tl.program_id(0) % blocks) * ROWS
    row = begin + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    here, wide = row < last, column < D
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, WIDTH), tl.float32)
    if SINK:  # a part whose output is nothing
        peak = total + tl.load(sinks + head).to(tl.float32)
        total = tl.where(peak > float("-inf"), 1.0, 0.0)
    if RUNNING:
        at = lane * rows + row
        x = tl.load(so_far + at[:, None] * D + column, mask=here[:, None] & wide, other=0.0)
        weight = tl.load(so_far_lse + at, mask=here, other=float("-inf"))
        peak, total, mixed = _joined(peak, total, mixed, x, weight)
    for n in tl.static_range(len(parts)):  # those of other rows are not even read
        start, step, count, height = parts[n][2], parts[n][3], parts[n][4], parts[n][5]
        if (begin + ROWS > start) & (begin < start + step * (count - 1) + height):
            x, weight = _read(parts[n], batch, head, row, column, here, wide)
            peak, total, mixed = _joined(peak, total, mixed, x, weight)
    total = tl.where(total > 0, total, 1.0)  # where nothing is, peak is -inf and mixed zero
    to = out + batch * ob + head * oh + row.to(tl.int64)[:, None] * on + column
    tl.store(to, mixed / total[:, None], mask=here[:, None] & wide)
    tl.store(lse + lane * rows + row, peak + tl.log(total), mask=here)


@triton.jit
@no_type_check
def _read(part, batch, head, row, column, here, wide):
    """A part's output and log-sum-exp of these rows; -inf where it covers none of them."""
    x, lse, start, step, count, height, flipped, group, xt, xb, xk, xg, xn, lt, lb, lk, lg, ln = (
        part
    )
    away = row - start
    tile = away // step
    within = away - tile * step
    covered = here & (away >= 0) & (tile < count) & (within < height)
    within = tl.where(flipped != 0, height - 1 - within, within).to(tl.int64)
    tile, kv, one = tile.to(tl.int64), head // group, head % group
    at = batch * lb + kv * lk + one * lg + tile * lt + within * ln
    weight = tl.load(lse + at, mask=covered, other=float("-inf")).to(tl.float32)
    at = batch * xb + kv * xk + one * xg + tile * xt + within * xn
    found = tl.load(x + at[:, None] + column, mask=covered[:, None] & wide, other=0.0)
    return found.to(tl.float32), weight


@triton.jit
@no_type_check
def _joined(peak, total, mixed, x, weight):
    """One more part: what is there and what comes, both against the larger of the two."""
    higher = tl.maximum(peak, weight)
    zero = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp(peak - zero), tl.exp(weight - zero)
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
    """Join the parts, what was joined before them and sinks (h) into out (b h n d) and lse (b h n).

    Only rows of `span` are written. lse and the rows of out are contiguous; both may be the running
    ones themselves. Rows that nothing covers get zeros, and -inf.
    """
    require(out)
    (b, h, n, d), (first, last) = out.shape, span or (0, out.shape[2])
    blocks = blocks or blocks_for(d)
    runs = triton.cdiv(last - first, blocks.rows)
    if not b * h * runs * d:
        return
    given = tuple(_numbers(part) for part in parts)
    kernel: Any = _merge_kernel[(b * h * runs,)]
    with torch.cuda.device_of(out):
        kernel(given, *(running or (out, lse)), lse if sinks is None else sinks, out, lse, first,
               last, h, n, *out.stride()[:3], runs, d, triton.next_power_of_2(d), blocks.rows,
               running is not None, sinks is not None, num_warps=blocks.warps,
               enable_fp_fusion=True)  # fmt: skip


def _numbers(part: TileOutput) -> tuple[Any, ...]:
    """A part as the kernel reads it: pointers, where its windows lie, strides."""
    (x,), tops = dense(part.out), part.tops
    height, group = x.shape[4], x.shape[3]
    step = tops[1] - tops[0] if len(tops) > 1 else height
    where = (tops[0], step, len(tops), height, int(part.flipped), group)
    return x, part.lse, *where, *x.stride()[:5], *part.lse.stride()


@triton.jit(do_not_specialize=("splits", "total_rows", "per_head", "heads"))
@no_type_check
def merge_shares_kernel(parts, sinks, out, splits, total_rows, per_head, heads, SINKS: tl.constexpr,
           DV: tl.constexpr, DV_PAD: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """The parts of one query's softmax, and a sink's logit as one more whose value is nothing."""
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
        at, real = (first + part) * total_rows + row, first + part < splits
        lse = tl.load(lses + at, mask=real, other=float("-inf"))
        more = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(more == float("-inf"), 0.0, more)
        weight, fade = tl.exp2(lse - base), tl.exp2(top - base)
        here = (lse > float("-inf"))[:, None] & (column < DV)[None, :]  # others were not written
        some = tl.load(parts + at[:, None] * DV + column[None, :], mask=here, other=0.0)
        acc = acc * fade + tl.sum(some * weight[:, None], 0)
        norm, top = norm * fade + tl.sum(weight, 0), more
    acc = acc / tl.where(norm > 0, norm, 1.0)
    tl.store(out + row * DV + column, acc.to(out.dtype.element_ty), mask=column < DV)


def blocks_for(d: int, numbers: int = 2048) -> Blocks:
    """So many numbers for four warps: of each of four parts, more would not stay in registers."""
    return Blocks(max(1, min(64, numbers // triton.next_power_of_2(max(d, 1)))), 4)


class MergeTogether:
    """Parts wait until a launch takes them; all in one, where there are few."""

    def __init__(self, rows: Sequence[int], like: Tensor) -> None:
        self.rows, self.like = rows, like
        self.waiting: list[TileOutput] = []
        self.running: Running | None = None

    def add(self, part: TileOutput) -> None:
        for one in part.evenly():
            if len(self.waiting) == MAX_PARTS:
                self._settle()
            self.waiting.append(one)

    def _settle(self) -> None:
        """Join what waits into the rows it covers; the first time, into all there are."""
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
        b, h, n = self.rows  # heads side by side in memory, as plain attention gives them
        out = self.like.new_empty(b, n, h, self.like.shape[-1]).transpose(1, 2)
        lse = self.like.new_empty(self.rows, dtype=torch.float32)
        merge(self.waiting, out, lse, running=self.running, sinks=sinks)
        return out, lse
