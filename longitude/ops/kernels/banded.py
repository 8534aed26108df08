"""Attention with a bias that depends on the distance alone, in one kernel, with its log-sum-exp.

score(i, j) = scale · q_i·k_j + table[h, i - j] for lo <= i - j < hi. The bias of a tile is a run of
rows + columns - 1 consecutive entries of its head's table, so it is read from cache, and no tensor
of size n² exists. Three things make it cheap:

- tiles that no edge of the band crosses are computed without a mask;
- a launch can continue an earlier one (`start`): the softmax so far is an output and its
  log-sum-exp, so the bands of one softmax need no separate merge;
- `reach` is a distance per head beyond which every weight is below 2^-32 of the largest in its row:
  keys further away are not even read (`bands.reach_of`; with ALiBi's slopes, most of them).

FIRE's bias depends on a share, the distance normalised by the query's position, so its table is
indexed by share (`Shares`). Within a block of rows the share of a distance hardly changes, and its
tiles use the bias of the middle row. The first blocks, where it does change, are left to a launch
with fewer rows per block, and those where even that is not enough to one that looks up every pair.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from longitude.core.validate import UserError
from longitude.ops.bands import MAX_HEAD, SHARE_ERROR, BandCall, Outs, Start, Sums
from longitude.ops.kernels.launch import Shape, device_of, launch, require, shape
from longitude.ops.plan import Band

LOG2E = 1 / math.log(2)
ERROR = tl.constexpr(SHARE_ERROR)
NARROW = 512  # a band up to this width has few tiles per row


class Blocks(NamedTuple):
    """Rows of queries per program, columns of keys per step, warps, and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


FINER = Blocks(64, 64, 4, 2)  # for rows whose shares change too much within a larger block


class LaunchCall(NamedTuple):
    """The arguments of a band, as every kernel reads them. Any tensor stands in for a missing table
    or reach. `key` holds all that the compiled kernel and its constants depend on."""

    part: BandCall
    table: tuple[Any, ...]
    reach: Tensor
    sizes: tuple[int, ...]
    scales: tuple[float, float]
    key: tuple[Any, ...]

    @classmethod
    def of(cls, part: BandCall) -> LaunchCall:
        q, k, v, bias, band, scale, reach, chunk = part
        shapes = (shape(q), shape(k), shape(v))
        sizes = _sizes(shapes, band, scale > 0, q.device)
        if sizes is None:
            opts = {"memory_format": torch.contiguous_format}
            return cls.of(part._replace(q=q.clone(**opts), k=k.clone(**opts), v=v.clone(**opts)))
        table: tuple[Any, ...] = (q, 0, 0, 1)
        if bias is not None:
            heads, length = bias.table.shape
            if heads != q.shape[1] or length == 0:
                raise UserError(
                    f"the bias table must have shape ({q.shape[1]} heads, 1 or more distances), "
                    f"but got {tuple(bias.table.shape)}: give a row for each head."
                )
            bias = bias._replace(table=bias.table.float().contiguous())
            table = (bias.table, bias.table.stride(0), bias.first, length)
        key = (shapes, table[2:] if bias else None, not (bias and bias.shares), sizes, chunk,
               reach is None)  # fmt: skip
        part = BandCall(q, k, v, bias, Band(*sizes[5:]), scale, reach, chunk)
        return cls(part, table, q if reach is None else reach, sizes, (scale * LOG2E, LOG2E), key)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that a kernel reads."""
        return (*self.part[:3], self.table[0], self.reach)

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        """The compile-time constants of a kernel. Without a bias no run of a table is read."""
        n, d, dv = *self.part.q.shape[2:], self.part.v.shape[-1]
        run = 0 if self.part.bias is None else _width(blocks.rows + blocks.columns - 1)
        return {
            "D": d, "DV": dv, "WIDTH": _width(d), "WIDTH_V": _width(dv), "ROWS": blocks.rows,
            "COLUMNS": blocks.columns, "RUN": run, "REACH": self.part.reach is not None,
            "WINDOW": self.part.band.hi < n, "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }  # fmt: skip


def laid(x: Tensor) -> tuple[Any, ...]:
    """A tensor (b h n …) as a kernel takes it: its pointer and the strides of b, h and n."""
    return (x, *x.stride()[:3])


def _width(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


@lru_cache(maxsize=4096)
def _sizes(
    shapes: tuple[Shape, ...], band: Band, positive: bool, device: torch.device
) -> tuple[int, ...] | None:
    """Checked sizes of a call: lanes (batch · heads), heads, query heads per key head, rows,
    columns and the band clipped to them. None if a tensor's last dimension is not contiguous."""
    require(device)
    (q, k, v), dtypes = (x[0] for x in shapes), [x[2] for x in shapes]
    if dtypes[0] not in (torch.float16, torch.bfloat16, torch.float32) or len({*dtypes}) > 1:
        raise UserError(
            f"the banded kernel takes q, k and v of one type, float16, bfloat16 or float32, but "
            f"got {dtypes[0]}, {dtypes[1]} and {dtypes[2]}: convert them."
        )
    if max(q[3], v[3]) > MAX_HEAD or not positive:
        raise UserError(
            f"the banded kernel supports head sizes up to {MAX_HEAD} and a positive scale, but got "
            f"head sizes {q[3]} (q, k) and {v[3]} (v) and a {'' if positive else 'non-'}positive "
            f"scale: use another backend."
        )
    if any(x[1][3] != 1 for x in shapes):
        return None
    return (q[0] * q[1], q[1], q[1] // k[1], q[2], k[2], *band.within(q[2], k[2]))


@triton.jit
@no_type_check
def tile_of(x, batch, head):
    """The address where one head of a tensor (pointer, strides) begins."""
    pointer, sb, sh, _ = x
    return pointer + tl.cast(batch, tl.int64) * sb + tl.cast(head, tl.int64) * sh


@triton.jit
@no_type_check
def bias_of(table, head, log2e):
    """One head's row of a table, its first distance, its length, and the factor to base 2."""
    pointer, by_head, first, length = table
    return pointer + tl.cast(head, tl.int64) * by_head, first, length, log2e


@triton.jit
@no_type_check
def load_tile(pointer, token, begin, end, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Rows begin … of one head as (ROWS, WIDTH), with zeros from row `end` and column D on."""
    pointer += tl.cast(begin, tl.int64) * token
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = pointer + row[:, None] * token + column[None, :]
    if MASKED:
        mask = (begin + row < end)[:, None] & (column < D)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)
    if D < WIDTH:
        return tl.load(pointers, mask=(column < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
@no_type_check
def store_tile(x, batch, head, begin, end, tile, D: tl.constexpr, ROWS: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Write rows begin … of one head, cast to the tensor's dtype."""
    row, column = begin + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = tile_of(x, batch, head) + row.to(tl.int64)[:, None] * x[3] + column[None, :]
    mask = (row < end)[:, None] & (column < D)[None, :]
    tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def spans(at, rows, n, m, lo, hi, reach, COLUMNS: tl.constexpr):
    """The columns visible to rows at … at+rows-1, cut at multiples of COLUMNS into three spans. An
    edge of the band may cross tiles of the first and the last span, but none of the second."""
    last = tl.minimum(at + rows, n)
    begin = tl.maximum(at - tl.minimum(hi, reach) + 1, 0) // COLUMNS * COLUMNS
    end = tl.maximum(tl.minimum(m, last - lo), begin)
    rounded_end = tl.cdiv(end, COLUMNS) * COLUMNS
    full_begin = tl.cdiv(tl.maximum(last - hi, 0), COLUMNS) * COLUMNS
    full_begin = tl.minimum(tl.maximum(full_begin, begin), rounded_end)
    full_end = tl.maximum(tl.minimum(m, at - lo + 1), 0) // COLUMNS * COLUMNS
    return begin, full_begin, tl.minimum(tl.maximum(full_end, full_begin), rounded_end), end


@triton.jit
@no_type_check
def chunk_of(chunk, at, n):
    """The first column that the chunk of the rows from `at` on may see, and the one after the last.
    All the rows lie in one chunk."""
    size, lo, hi, row, column = chunk
    row_chunk = (at + row) // size
    first = tl.maximum((tl.cast(row_chunk, tl.int64) - hi + 1) * size - column, 0)
    last = tl.maximum(tl.minimum((tl.cast(row_chunk, tl.int64) - lo + 1) * size - column, n), 0)
    return first.to(tl.int32), last.to(tl.int32)


@triton.jit
@no_type_check
def within(ends, first, last, COLUMNS: tl.constexpr):
    """The spans of columns, clipped to columns first … last-1."""
    begin, full_begin, full_end, end = ends
    begin = tl.maximum(begin, first // COLUMNS * COLUMNS)
    end = tl.maximum(tl.minimum(end, last), begin)
    rounded_end = tl.cdiv(end, COLUMNS) * COLUMNS
    full_begin = tl.minimum(tl.maximum(full_begin, tl.cdiv(first, COLUMNS) * COLUMNS), rounded_end)
    full_begin = tl.maximum(full_begin, begin)
    full_end = tl.minimum(tl.minimum(full_end, last // COLUMNS * COLUMNS), rounded_end)
    return begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit
@no_type_check
def bias_tile(table, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
              FLIP: tl.constexpr):  # fmt: skip
    """The bias of a tile whose smallest distance is `least`: (ROWS, COLUMNS), or transposed."""
    pointer, first, length, unit = table
    entry = least - first + tl.arange(0, RUN)
    run = tl.load(pointer + tl.minimum(tl.maximum(entry, 0), length - 1)) * unit
    return spread(run, ROWS, COLUMNS, FLIP)


@triton.jit
@no_type_check
def spread(run, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FLIP: tl.constexpr):
    """Spread a run of biases, one per distance, over the diagonals of a tile.

    Each thread has loaded one entry. A gather through shared memory brings them into the layout
    that the product of q and k has; a load per pair would need a conversion there as well.
    """
    row, column = tl.arange(0, ROWS), COLUMNS - 1 - tl.arange(0, COLUMNS)
    if FLIP:
        index = tl.reshape(column[:, None] + row[None, :], (COLUMNS * ROWS,))
        tile = tl.reshape(tl.gather(run, index, 0), (COLUMNS, ROWS))
    else:
        index = tl.reshape(row[:, None] + column[None, :], (ROWS * COLUMNS,))
        tile = tl.reshape(tl.gather(run, index, 0), (ROWS, COLUMNS))
    return tile


@triton.jit
@no_type_check
def bias_by_share(table, c, away, pace):
    """The bias at these distances, for rows with this pace (see `bands.Shares`)."""
    pointer, _, length, unit = table
    entry = (tl.log2(1.0 + c * tl.abs(away).to(tl.float32)) * pace + 0.5).to(tl.int32)
    return tl.load(pointer + tl.minimum(entry, length - 1)) * unit


@triton.jit
@no_type_check
def steady(shares, head, at, UNIT: tl.constexpr, ROWS: tl.constexpr):
    """Whether each block of ROWS rows, in the UNIT rows around `at`, can use its middle row."""
    steepest, stable = tl.load(shares[2] + head), at >= 0
    for block in tl.static_range(UNIT // ROWS):
        pace = shares[0] + at // UNIT * UNIT + block * ROWS
        drop = 1.0 - tl.load(pace + ROWS) / tl.load(pace)  # at most half of it from the middle row
        stable = stable & (drop * steepest <= 2 * ERROR)
    return stable


def blocks_for(
    q: Tensor, v: Tensor, width: int = 2 * NARROW, biased: bool = True, shares: bool = False
) -> Blocks:
    """The blocks for a head size and a band's width, as measured on an H200: two small programs
    hide each other's loads, but the gather of a bias is faster with large tiles."""
    d = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32:  # no tensor cores: only registers limit the blocks
        return Blocks(64, 32, 8, 2) if d <= 64 else Blocks(32, 32, 8, 2)
    if d <= 128 and (width <= NARROW or not biased):
        return Blocks(64, 64, 4, 2 if biased else 3)
    if d <= 128:
        return Blocks(128, 64 if shares else 128, 8, 3)
    return Blocks(128, 32, 8, 2)


@triton.jit
@no_type_check
def _span(state, q, k, v, edges, rows, begin, end, table, shares, scale, D: tl.constexpr,
          DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr, RUN: tl.constexpr, SHARES: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """Add the columns begin … end-1 to the running softmax of these rows."""
    acc, row_sum, row_max = state
    k, k_token = k
    v, v_token = v
    at, first, m, lo, hi = edges
    for left in tl.range(begin, end, COLUMNS):
        keys = load_tile(k, k_token, left, m, D, COLUMNS, WIDTH, MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision="ieee")
        columns = left + tl.arange(0, COLUMNS)
        dist = rows[:, None] - columns[None, :]
        least = at - left - COLUMNS + 1
        if SHARES == "blocks":
            run = bias_by_share(table, shares[1], least - table[1] + tl.arange(0, RUN), shares[0])
            s = s * scale + spread(run, ROWS, COLUMNS, False)
        elif SHARES == "pairs":
            s = s * scale + bias_by_share(table, shares[1], dist - table[1], shares[0][:, None])
        elif RUN:
            s = s * scale + bias_tile(table, least, ROWS, COLUMNS, RUN, False)
        if MASKED:
            in_range = (columns >= first) & (columns < m)
            s = tl.where((dist >= lo) & (dist < hi) & in_range[None, :], s, float("-inf"))
        factor = 1.0 if RUN else scale  # without a bias, scaling is fused with the subtraction
        new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
        base = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p, rescale = tl.exp2(s * factor - base[:, None]), tl.exp2(row_max - base)
        values = load_tile(v, v_token, left, m, DV, COLUMNS, WIDTH_V, MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
@no_type_check
def _begin(start, top, batch, head, rows, n, log2e, DV: tl.constexpr, ROWS: tl.constexpr,
           WIDTH_V: tl.constexpr, STARTED: tl.constexpr):  # fmt: skip
    """The softmax so far: that of an earlier launch if STARTED, else an empty one."""
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    if STARTED:
        out, lse = start
        valid = (rows >= top) & (rows < n)
        row, column = (rows - top).to(tl.int64), tl.arange(0, WIDTH_V)
        ptrs = tile_of(out, batch, head) + row[:, None] * out[3] + column[None, :]
        acc = tl.load(ptrs, mask=valid[:, None] & (column < DV)[None, :], other=0.0).to(tl.float32)
        ptrs = tile_of(lse, batch, head) + row * lse[3]
        row_max = tl.load(ptrs, mask=valid, other=float("-inf")).to(tl.float32) * log2e
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return acc, row_sum, row_max


# Triton specializes kernels on integers that are 1 or divisible by 16; not on these token counts
@triton.jit(
    do_not_specialize="n m lo hi top chunk_size chunk_lo chunk_hi chunk_row chunk_column".split()
)
@no_type_check
def _kernel(q, k, v, out, lse, start, table, shares, reach, sizes, scales, n, m, lo, hi, top,
            chunk_size, chunk_lo, chunk_hi, chunk_row, chunk_column,
            D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
            ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, SHARES: tl.constexpr,
            STARTED: tl.constexpr, WINDOW: tl.constexpr, REACH: tl.constexpr,
            CHUNKED: tl.constexpr, COARSER: tl.constexpr, FINE: tl.constexpr):  # fmt: skip
    """One block of rows of one head. Long rows go first, and heads that share keys are adjacent."""
    lanes, heads, group = sizes
    scale, log2e = scales
    lane = tl.program_id(0) % lanes
    at = (tl.cdiv(n, ROWS) - 1 - tl.program_id(0) // lanes) * ROWS
    batch, head = lane // heads, lane % heads
    rows = at + tl.arange(0, ROWS)
    by_share = (0.0, 0.0)
    if SHARES != "none":
        # other launches, with more or fewer rows per block, compute the other blocks
        live = SHARES == "pairs" or steady(shares, head, at, ROWS, ROWS)
        if COARSER:
            live = live & (steady(shares, head, at, COARSER, FINE) == 0)
        if not live:
            return
        own = tl.load(shares[0] + at + (ROWS // 2 if SHARES == "blocks" else tl.arange(0, ROWS)))
        by_share = (own, tl.load(shares[1]))
    tile = load_tile(tile_of(q, batch, head), q[3], at, n, D, ROWS, WIDTH, True)
    max_distance = tl.load(reach + lane) if REACH else n
    ends = spans(at, ROWS, n, m, lo, hi, max_distance, COLUMNS)
    first = 0
    if CHUNKED:
        chunk = (chunk_size, chunk_lo, chunk_hi, chunk_row, chunk_column)
        first, m = chunk_of(chunk, at, m)
        ends = within(ends, first, m, COLUMNS)
    own = head // group
    keys, values = (tile_of(k, batch, own), k[3]), (tile_of(v, batch, own), v[3])
    bias, edges = bias_of(table, head, log2e), (at, first, m, lo, hi)
    state = _begin(start, top, batch, head, rows, n, log2e, DV, ROWS, WIDTH_V, STARTED)
    for span in tl.static_range(3):
        if span > 0 or WINDOW or CHUNKED:
            state = _span(state, tile, keys, values, edges, rows, ends[span], ends[span + 1], bias,
                          by_share, scale, D, DV, WIDTH, WIDTH_V, ROWS, COLUMNS, RUN, SHARES,
                          span != 1)  # fmt: skip
    acc, row_sum, row_max = state
    empty = row_sum == 0.0  # rows that see no key get zeros
    row_sum = tl.where(empty, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    store_tile(out, batch, head, at, n, acc, DV, ROWS, WIDTH_V)
    row_lse = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum)) / log2e
    tl.store(tile_of(lse, batch, head) + rows.to(tl.int64) * lse[3], row_lse, mask=rows < n)


def banded(
    part: BandCall, start: Start | None = None, blocks: Blocks | None = None, wide: bool = False
) -> tuple[Outs, Sums]:
    """Output and log-sum-exp of a band, continued from `start`. A start with every row, in v's
    dtype, is overwritten: each program reads its own rows before it writes them. `wide` makes the
    output float32, for a band that is not the last part of its softmax."""
    call = LaunchCall.of(part)
    q, k, v = call.part[:3]
    out_shape = (*q.shape[:3], v.shape[-1])
    if start is not None and (start.out.shape, start.out.dtype) == (out_shape, v.dtype):
        out, lse = start.out, start.lse
    else:
        (b, h, n, d), dtype = out_shape, torch.float32 if wide else v.dtype
        if q.shape == out_shape:  # in q's memory layout, else tokens before heads, as in layers
            out = torch.empty_like(q, dtype=dtype)
        else:
            out = v.new_empty(b, n, h, d, dtype=dtype).transpose(1, 2)
        lse = v.new_empty(b, h, n + -n % 16, dtype=torch.float32)
        lse = lse if lse.shape[2] == n else lse[..., :n]
    so_far = start or Start(out, lse)
    outputs = (out, lse, so_far.out, so_far.lse)
    shares = tuple(part.bias.shares or ()) if part.bias else ()
    coarser = (0, 0)
    if blocks is None and device_of(q.device).hopper:
        from longitude.ops.kernels import hopper_launch as hopper  # late: it imports this file

        if hopper.forward(call, so_far, start is not None, outputs):
            if not shares:
                return out, lse
            coarser = (hopper.ROWS, hopper.ROWS // 2)  # it skips unsteady rows
    if not q.numel():
        return out, lse
    (lo, hi), biased = call.part.band, part.bias is not None
    chosen = blocks or blocks_for(q, v, hi - lo, biased, bool(shares))
    variants = [("none", chosen)]
    if shares:  # prefetching an entry for every pair would exceed shared memory
        levels = [chosen, FINER] if FINER.rows < chosen.rows else [chosen]
        pairs = ("pairs", levels[-1]._replace(stages=1))
        variants = [pairs] if coarser[0] else [*(("blocks", own) for own in levels), pairs]
    start_args = (laid(so_far.out), laid(so_far.lse))
    args = (*map(laid, (q, k, v, out, lse)), start_args, call.table, shares, call.reach)
    args += (call.sizes[:3], call.scales)
    counts = (*call.sizes[3:], so_far.top, *(part.chunk or (1, 0, 1, 0, 0)))
    key = (call.key, *map(shape, outputs), so_far.top, start is None)
    flags = {"STARTED": start is not None, "CHUNKED": part.chunk is not None}
    for kind, own in variants:
        programs = call.sizes[0] * -(-q.shape[2] // own.rows)
        kernel = flags | {"SHARES": kind, "COARSER": coarser[0], "FINE": coarser[1]}
        launch(
            _kernel, (programs, 1, 1), (*args, *counts), (*call.tensors, *outputs, *shares),
            (*key, kind, own, coarser), lambda own=own, kernel=kernel: call.constants(own) | kernel,
        )  # fmt: skip
        coarser = (own.rows, own.rows)
    return out, lse
