"""Attention whose scores get a bias of the distance alone, in one kernel, with its log-sum-exp.

score(i, j) = scale · q_i·k_j + table[h, i - j] for lo <= i - j < hi. The bias of a tile is a run of
its head's table, rows + columns - 1 entries long, so it is read from cache and nothing of size n²
exists. Three things make it cheap:

- tiles that no edge of the band crosses are computed without a mask;
- a launch can begin where another ended (`start`): softmax so far is an output and its
  log-sum-exp, so the parts of one softmax need no merge of their own;
- `reach` is a distance per head beyond which every weight is below 2^-32 of its row's largest: keys
  further away are not even read (`bands.reach_of`: with ALiBi's slopes, most of them).

FIRE's bias is of a share, the distance normalised by the query's position: its table is of shares
(`Shares`). Over a block of rows the shares of a distance hardly change, and the bias of its tiles
is that of the middle row. The first blocks, where they do change, are left to a launch with blocks
of fewer rows, and what changes over those to one that looks every pair up.
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
NARROW = 512  # a band of few tiles per row


class Blocks(NamedTuple):
    """What one program takes: rows of queries, columns of keys at a time, by so many warps."""

    rows: int
    columns: int
    warps: int
    stages: int


FINER = Blocks(64, 64, 4, 2)  # of rows whose shares change too much over more of them


class LaunchCall(NamedTuple):
    """A band as every kernel reads it. Arguments are always there: any tensor stands for a table or
    a reach that is not. `key` is what a kernel is compiled for, and all that shapes decide."""

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
            laid = {"memory_format": torch.contiguous_format}
            return cls.of(part._replace(q=q.clone(**laid), k=k.clone(**laid), v=v.clone(**laid)))
        table: tuple[Any, ...] = (q, 0, 0, 1)
        if bias is not None:
            heads, length = bias.table.shape
            if heads != q.shape[1] or length == 0:
                raise UserError(
                    f"a bias by distance is (heads, distances) = ({q.shape[1]}, 1 or more), but "
                    f"got {tuple(bias.table.shape)}: give a row for each head."
                )
            bias = bias._replace(table=bias.table.float().contiguous())
            table = (bias.table, bias.table.stride(0), bias.first, length)
        key = (shapes, table[2:] if bias else None, not (bias and bias.shares), sizes, chunk,
               reach is None)  # fmt: skip
        part = BandCall(q, k, v, bias, Band(*sizes[5:]), scale, reach, chunk)
        return cls(part, table, q if reach is None else reach, sizes, (scale * LOG2E, LOG2E), key)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that a kernel reads."""
        return (*self.part[:3], self.table[0], self.reach)

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        """What a kernel is compiled for; a tile without a bias needs no run of the table."""
        n, d, dv = *self.part.q.shape[2:], self.part.v.shape[-1]
        run = 0 if self.part.bias is None else _width(blocks.rows + blocks.columns - 1)
        return {
            "D": d, "DV": dv, "WIDTH": _width(d), "WIDTH_V": _width(dv), "ROWS": blocks.rows,
            "COLUMNS": blocks.columns, "RUN": run, "REACH": self.part.reach is not None,
            "WINDOW": self.part.band.hi < n, "num_warps": blocks.warps,
            "num_stages": blocks.stages,
        }  # fmt: skip


def laid(x: Tensor) -> tuple[Any, ...]:
    """A tensor (b h n …) for a kernel: its pointer and the strides of all but its last."""
    return (x, *x.stride()[:3])


def _width(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


@lru_cache(maxsize=4096)
def _sizes(
    shapes: tuple[Shape, ...], band: Band, positive: bool, device: torch.device
) -> tuple[int, ...] | None:
    """Lanes, heads, heads to each of keys, rows, columns and the band within them, checked; None
    where a tensor's last dimension is not contiguous."""
    require(device)
    (q, k, v), dtypes = (x[0] for x in shapes), [x[2] for x in shapes]
    if dtypes[0] not in (torch.float16, torch.bfloat16, torch.float32) or len({*dtypes}) > 1:
        raise UserError(
            f"the banded kernel takes q, k and v of one type, float16, bfloat16 or float32, but "
            f"got {dtypes[0]}, {dtypes[1]} and {dtypes[2]}: convert them."
        )
    if max(q[3], v[3]) > MAX_HEAD or not positive:
        raise UserError(
            f"the banded kernel takes heads of up to {MAX_HEAD} and a scale above zero, but got "
            f"{q[3]}, {v[3]} and a scale {'above' if positive else 'not above'} it: use another "
            f"backend."
        )
    if any(x[1][3] != 1 for x in shapes):
        return None
    return (q[0] * q[1], q[1], q[1] // k[1], q[2], k[2], *band.within(q[2], k[2]))


@triton.jit
@no_type_check
def tile_of(x, batch, head):
    """Where one head of a tensor (pointer, strides) begins."""
    pointer, sb, sh, _ = x
    return pointer + tl.cast(batch, tl.int64) * sb + tl.cast(head, tl.int64) * sh


@triton.jit
@no_type_check
def bias_of(table, head, log2e):
    """One head's row of a table, where it begins, how long it is, and its unit in powers of two."""
    pointer, by_head, first, length = table
    return pointer + tl.cast(head, tl.int64) * by_head, first, length, log2e


@triton.jit
@no_type_check
def load_tile(pointer, token, begin, end, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Rows begin … of one head as (ROWS, WIDTH), zeros past its end and its size."""
    pointer += tl.cast(begin, tl.int64) * token
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = pointer + row[:, None] * token + column[None, :]
    if MASKED:
        here = (begin + row < end)[:, None] & (column < D)[None, :]
        return tl.load(pointers, mask=here, other=0.0)
    if D < WIDTH:
        return tl.load(pointers, mask=(column < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
@no_type_check
def store_tile(x, batch, head, begin, end, tile, D: tl.constexpr, ROWS: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Write rows begin … of one head, in the tensor's own type."""
    row, column = begin + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = tile_of(x, batch, head) + row.to(tl.int64)[:, None] * x[3] + column[None, :]
    here = (row < end)[:, None] & (column < D)[None, :]
    tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=here)


@triton.jit
@no_type_check
def spans(at, rows, n, m, lo, hi, reach, COLUMNS: tl.constexpr):
    """The columns that rows at … at+rows-1 see, cut at multiples of COLUMNS into three spans: an
    edge of the band may cross the tiles of the first and of the last, and none of the second."""
    last = tl.minimum(at + rows, n)
    begin = tl.maximum(at - tl.minimum(hi, reach) + 1, 0) // COLUMNS * COLUMNS
    end = tl.maximum(tl.minimum(m, last - lo), begin)
    top = tl.cdiv(end, COLUMNS) * COLUMNS
    inner = tl.cdiv(tl.maximum(last - hi, 0), COLUMNS) * COLUMNS
    inner = tl.minimum(tl.maximum(inner, begin), top)
    seen = tl.maximum(tl.minimum(m, at - lo + 1), 0) // COLUMNS * COLUMNS
    return begin, inner, tl.minimum(tl.maximum(seen, inner), top), end


@triton.jit
@no_type_check
def chunk_of(chunk, at, n):
    """The first column and the one past the last that rows from `at` on see of their chunks; the
    rows lie in one chunk."""
    size, lo, hi, row, column = chunk
    own = (at + row) // size
    first = tl.maximum((tl.cast(own, tl.int64) - hi + 1) * size - column, 0)
    last = tl.maximum(tl.minimum((tl.cast(own, tl.int64) - lo + 1) * size - column, n), 0)
    return first.to(tl.int32), last.to(tl.int32)


@triton.jit
@no_type_check
def within(ends, first, last, COLUMNS: tl.constexpr):
    """The spans of columns, cut to first … last-1."""
    begin, inner, seen, end = ends
    begin = tl.maximum(begin, first // COLUMNS * COLUMNS)
    end = tl.maximum(tl.minimum(end, last), begin)
    top = tl.cdiv(end, COLUMNS) * COLUMNS
    inner = tl.minimum(tl.maximum(inner, tl.cdiv(first, COLUMNS) * COLUMNS), top)
    inner = tl.maximum(inner, begin)
    seen = tl.minimum(tl.minimum(seen, last // COLUMNS * COLUMNS), top)
    return begin, inner, tl.maximum(seen, inner), end


@triton.jit
@no_type_check
def bias_tile(table, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
              FLIP: tl.constexpr):  # fmt: skip
    """The bias of a tile whose least distance is `least`, (ROWS, COLUMNS) or transposed."""
    pointer, first, length, unit = table
    entry = least - first + tl.arange(0, RUN)
    run = tl.load(pointer + tl.minimum(tl.maximum(entry, 0), length - 1)) * unit
    return spread(run, ROWS, COLUMNS, FLIP)


@triton.jit
@no_type_check
def spread(run, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FLIP: tl.constexpr):
    """A run of distances over the diagonals of a tile.

    One entry a thread was read, and a gather spreads them from shared memory over the tile, in
    whatever layout the product of q and k has; loading by pairs would convert it there.
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
    """The bias at distances, of rows with this pace."""
    pointer, _, length, unit = table
    entry = (tl.log2(1.0 + c * tl.abs(away).to(tl.float32)) * pace + 0.5).to(tl.int32)
    return tl.load(pointer + tl.minimum(entry, length - 1)) * unit


@triton.jit
@no_type_check
def steady(shares, head, at, UNIT: tl.constexpr, ROWS: tl.constexpr):
    """Whether middle rows can stand for each block of so many rows, of the unit that `at` is in."""
    steepest, held = tl.load(shares[2] + head), at >= 0
    for block in tl.static_range(UNIT // ROWS):
        pace = shares[0] + at // UNIT * UNIT + block * ROWS
        falls = 1.0 - tl.load(pace + ROWS) / tl.load(pace)  # by at most half of it from the middle
        held = held & (falls * steepest <= 2 * ERROR)
    return held


def blocks_for(
    q: Tensor, v: Tensor, width: int = 2 * NARROW, biased: bool = True, shares: bool = False
) -> Blocks:
    """The blocks for a head size and a band's width, as measured on an H200: two small programs
    hide each other's loads, but a bias's gather wants large tiles."""
    d = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32:  # multiplied by ordinary units, so registers are all that counts
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
    """Take the columns begin … end-1 into the running softmax of these rows."""
    acc, total, most = state
    k, k_token = k
    v, v_token = v
    at, first, m, lo, hi = edges
    for left in tl.range(begin, end, COLUMNS):
        keys = load_tile(k, k_token, left, m, D, COLUMNS, WIDTH, MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision="ieee")
        columns = left + tl.arange(0, COLUMNS)
        away = rows[:, None] - columns[None, :]
        least = at - left - COLUMNS + 1
        if SHARES == "blocks":
            run = bias_by_share(table, shares[1], least - table[1] + tl.arange(0, RUN), shares[0])
            s = s * scale + spread(run, ROWS, COLUMNS, False)
        elif SHARES == "pairs":
            s = s * scale + bias_by_share(table, shares[1], away - table[1], shares[0][:, None])
        elif RUN:
            s = s * scale + bias_tile(table, least, ROWS, COLUMNS, RUN, False)
        if MASKED:
            here = (columns >= first) & (columns < m)
            s = tl.where((away >= lo) & (away < hi) & here[None, :], s, float("-inf"))
        unit = 1.0 if RUN else scale  # without a bias, scaling waits to be part of a subtraction
        new = tl.maximum(most, tl.max(s, 1) * unit)
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        p, shrink = tl.exp2(s * unit - base[:, None]), tl.exp2(most - base)
        values = load_tile(v, v_token, left, m, DV, COLUMNS, WIDTH_V, MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        most = new
    return acc, total, most


@triton.jit
@no_type_check
def _begin(start, top, batch, head, rows, n, log2e, DV: tl.constexpr, ROWS: tl.constexpr,
           WIDTH_V: tl.constexpr, STARTED: tl.constexpr):  # fmt: skip
    """The softmax so far: of an earlier launch, or of nothing."""
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    if STARTED:
        out, lse = start
        here = (rows >= top) & (rows < n)
        row, column = (rows - top).to(tl.int64), tl.arange(0, WIDTH_V)
        where = tile_of(out, batch, head) + row[:, None] * out[3] + column[None, :]
        acc = tl.load(where, mask=here[:, None] & (column < DV)[None, :], other=0.0).to(tl.float32)
        where = tile_of(lse, batch, head) + row * lse[3]
        most = tl.load(where, mask=here, other=float("-inf")).to(tl.float32) * log2e
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    return acc, total, most


# kernels are compiled anew for numbers that are 1 or multiples of 16: not for those of tokens
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
    """One block of rows of one head. The longest rows go first, heads that share keys together."""
    lanes, heads, group = sizes
    scale, log2e = scales
    lane = tl.program_id(0) % lanes
    at = (tl.cdiv(n, ROWS) - 1 - tl.program_id(0) // lanes) * ROWS
    batch, head = lane // heads, lane % heads
    rows = at + tl.arange(0, ROWS)
    by_share = (0.0, 0.0)
    if SHARES != "none":
        # other launches have the rest: blocks of more rows, and of fewer
        mine = SHARES == "pairs" or steady(shares, head, at, ROWS, ROWS)
        if COARSER:
            mine = mine & (steady(shares, head, at, COARSER, FINE) == 0)
        if not mine:
            return
        own = tl.load(shares[0] + at + (ROWS // 2 if SHARES == "blocks" else tl.arange(0, ROWS)))
        by_share = (own, tl.load(shares[1]))
    tile = load_tile(tile_of(q, batch, head), q[3], at, n, D, ROWS, WIDTH, True)
    far = tl.load(reach + lane) if REACH else n
    ends = spans(at, ROWS, n, m, lo, hi, far, COLUMNS)
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
    acc, total, most = state
    none = total == 0.0  # a row that sees nothing gets zeros
    total = tl.where(none, 1.0, total)
    acc = acc / total[:, None]
    store_tile(out, batch, head, at, n, acc, DV, ROWS, WIDTH_V)
    sums = tl.where(none, float("-inf"), most + tl.log2(total)) / log2e
    tl.store(tile_of(lse, batch, head) + rows.to(tl.int64) * lse[3], sums, mask=rows < n)


def banded(
    part: BandCall, start: Start | None = None, blocks: Blocks | None = None, wide: bool = False
) -> tuple[Outs, Sums]:
    """Output and log-sum-exp of a band, its rows after a start's. A start that has
    every row is overwritten: each program reads its own rows of it before it writes them. `wide`
    outputs are float32, for what is not the last part of a softmax."""
    call = LaunchCall.of(part)
    q, k, v = call.part[:3]
    size = (*q.shape[:3], v.shape[-1])
    if start is not None and (start.out.shape, start.out.dtype) == (size, v.dtype):
        out, lse = start.out, start.lse
    else:
        (b, h, n, d), dtype = size, torch.float32 if wide else v.dtype
        if q.shape == size:  # in memory as q lies, or tokens before heads, as layers have them
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
        from longitude.ops.kernels import hopper_launch as hopper  # late: it builds on this

        if hopper.forward(call, so_far, start is not None, outputs):
            if not shares:
                return out, lse
            coarser = (hopper.ROWS, hopper.ROWS // 2)  # it leaves unsteady rows
    if not q.numel():
        return out, lse
    (lo, hi), biased = call.part.band, part.bias is not None
    chosen = blocks or blocks_for(q, v, hi - lo, biased, bool(shares))
    kinds = [("none", chosen)]
    if shares:  # loads ahead of every pair's entry would not fit into shared memory
        levels = [chosen, FINER] if FINER.rows < chosen.rows else [chosen]
        pairs = ("pairs", levels[-1]._replace(stages=1))
        kinds = [pairs] if coarser[0] else [*(("blocks", own) for own in levels), pairs]
    begun = (laid(so_far.out), laid(so_far.lse))
    given = (*map(laid, (q, k, v, out, lse)), begun, call.table, shares, call.reach)
    given += (call.sizes[:3], call.scales)
    tokens = (*call.sizes[3:], so_far.top, *(part.chunk or (1, 0, 1, 0, 0)))
    key = (call.key, *map(shape, outputs), so_far.top, start is None)
    how = {"STARTED": start is not None, "CHUNKED": part.chunk is not None}
    for kind, own in kinds:
        programs = call.sizes[0] * -(-q.shape[2] // own.rows)
        kernel = how | {"SHARES": kind, "COARSER": coarser[0], "FINE": coarser[1]}
        launch(
            _kernel, (programs, 1, 1), (*given, *tokens), (*call.tensors, *outputs, *shares),
            (*key, kind, own, coarser), lambda own=own, kernel=kernel: call.constants(own) | kernel,
        )  # fmt: skip
        coarser = (own.rows, own.rows)
    return out, lse
