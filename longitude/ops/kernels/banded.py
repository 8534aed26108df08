"""Attention whose scores get a bias of the distance alone, in one kernel, with its log-sum-exp.

score(i, j) = scale · q_i·k_j + table[h, i - j] for lo <= i - j < hi, and softmax as ever. The bias
of a tile is a run of its head's table, rows + columns - 1 entries long, so it is read from cache
and no n² of anything exists; `band.eager` is the twin. Three things make it cheap:

- tiles that no edge of the band crosses are computed without a mask;
- a launch can begin where another ended (`start`): softmax so far is an output and its
  log-sum-exp, so the parts of one softmax need no merge of their own;
- `reach` is a distance a head beyond which every weight is below 2^-32 of its row's largest: keys
  further away are not even read (`band.reach_of`: with ALiBi's slopes, most of them).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from longitude.ops.band import Outs, Part, Start, Sums
from longitude.ops.kernels.banded_tile import (
    Blocks,
    Call,
    bias_of,
    bias_tile,
    chunk_of,
    laid,
    load_tile,
    spans,
    store_tile,
    tile_of,
    within,
)
from longitude.ops.kernels.launch import launch, shape

NARROW = 512  # a band of few tiles a row


def blocks_for(q: Tensor, v: Tensor, width: int = 2 * NARROW, biased: bool = True) -> Blocks:
    """The blocks for a head size and a band's width, as measured on an H200: two small programs
    hide each other's loads, but a bias's gather wants large tiles."""
    d = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32:  # multiplied by ordinary units, so registers are all that counts
        return Blocks(64, 32, 8, 2) if d <= 64 else Blocks(32, 32, 8, 2)
    if d <= 128 and (width <= NARROW or not biased):
        return Blocks(64, 64, 4, 2 if biased else 3)
    if d <= 64:
        return Blocks(128, 128, 8, 3)
    return Blocks(128, 128, 8, 3) if d <= 128 else Blocks(128, 32, 8, 2)


@triton.jit
@no_type_check
def _span(state, q, k, v, edges, rows, begin, end, table, scale, D: tl.constexpr,
          DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Take the columns begin … end-1 into the running softmax of these rows."""
    acc, total, most = state
    k, k_token = k
    v, v_token = v
    at, first, m, lo, hi = edges
    for left in tl.range(begin, end, COLUMNS):
        keys = load_tile(k, k_token, left, m, D, COLUMNS, WIDTH, MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if RUN:
            s = s * scale + bias_tile(table, at - left - COLUMNS + 1, ROWS, COLUMNS, RUN, False)
        if MASKED:
            columns = left + tl.arange(0, COLUMNS)
            away = rows[:, None] - columns[None, :]
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
def _begin(start, batch, head, rows, n, log2e, DV: tl.constexpr, ROWS: tl.constexpr,
           WIDTH_V: tl.constexpr, STARTED: tl.constexpr):  # fmt: skip
    """The softmax so far: of an earlier launch, or of nothing."""
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    if STARTED:
        out, lse, top = start
        here = (rows >= top) & (rows < n)
        row, column = (rows - top).to(tl.int64), tl.arange(0, WIDTH_V)
        where = tile_of(out, batch, head) + row[:, None] * out[3] + column[None, :]
        acc = tl.load(where, mask=here[:, None] & (column < DV)[None, :], other=0.0).to(tl.float32)
        where = tile_of(lse, batch, head) + row * lse[3]
        most = tl.load(where, mask=here, other=float("-inf")).to(tl.float32) * log2e
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    return acc, total, most


@triton.jit
@no_type_check
def _kernel(q, k, v, out, lse, start, table, reach, chunk, sizes, scales, D: tl.constexpr,
            DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
            COLUMNS: tl.constexpr, RUN: tl.constexpr, STARTED: tl.constexpr,
            WINDOW: tl.constexpr, REACH: tl.constexpr, CHUNKED: tl.constexpr):  # fmt: skip
    """One block of rows of one head. The longest rows go first, heads that share keys together."""
    lanes, heads, group, n, m, lo, hi = sizes
    scale, log2e = scales
    lane = tl.program_id(0) % lanes
    at = (tl.cdiv(n, ROWS) - 1 - tl.program_id(0) // lanes) * ROWS
    batch, head = lane // heads, lane % heads
    rows = at + tl.arange(0, ROWS)
    tile = load_tile(tile_of(q, batch, head), q[3], at, n, D, ROWS, WIDTH, True)
    far = tl.load(reach + lane) if REACH else n
    begin, whole, seen, end = spans(at, ROWS, n, m, lo, hi, far, COLUMNS)
    first = 0
    if CHUNKED:
        first, m = chunk_of(chunk, at, m)
        begin, whole, seen, end = within(begin, whole, seen, end, first, m, COLUMNS)
    own = head // group
    keys, values = (tile_of(k, batch, own), k[3]), (tile_of(v, batch, own), v[3])
    bias, edges = bias_of(table, head, log2e), (at, first, m, lo, hi)
    state = _begin(start, batch, head, rows, n, log2e, DV, ROWS, WIDTH_V, STARTED)
    if WINDOW or CHUNKED:
        state = _span(state, tile, keys, values, edges, rows, begin, whole, bias, scale, D, DV,
                      WIDTH, WIDTH_V, ROWS, COLUMNS, RUN, True)  # fmt: skip
    state = _span(state, tile, keys, values, edges, rows, whole, seen, bias, scale, D, DV, WIDTH,
                  WIDTH_V, ROWS, COLUMNS, RUN, False)  # fmt: skip
    state = _span(state, tile, keys, values, edges, rows, seen, end, bias, scale, D, DV, WIDTH,
                  WIDTH_V, ROWS, COLUMNS, RUN, True)  # fmt: skip
    acc, total, most = state
    none = total == 0.0  # a row that sees nothing gets zeros
    total = tl.where(none, 1.0, total)
    acc = acc / total[:, None]
    store_tile(out, batch, head, at, n, acc, DV, ROWS, WIDTH_V)
    sums = tl.where(none, float("-inf"), most + tl.log2(total)) / log2e
    tl.store(tile_of(lse, batch, head) + rows.to(tl.int64) * lse[3], sums, mask=rows < n)


def banded(
    part: Part, start: Start | None = None, blocks: Blocks | None = None
) -> tuple[Outs, Sums]:
    """Output and log-sum-exp of a band; `band.eager` says what they are. A start that has every row
    is written over: each program reads its own rows of it before it writes them."""
    call = Call.of(part)
    q, k, v = call.part[:3]
    lo, hi = call.part.band
    blocks = blocks or blocks_for(q, v, hi - lo, call.part.bias is not None)
    size = (*q.shape[:3], v.shape[-1])
    if start is not None and (start.out.shape, start.out.dtype) == (size, v.dtype):
        out, lse = start.out, start.lse
    else:
        (b, h, n), d = size[:3], size[3]  # in memory tokens before heads, as layers have them
        out = torch.empty(b, n, h, d, dtype=v.dtype, device=v.device).transpose(1, 2)
        lse = torch.empty(size[:3], dtype=torch.float32, device=v.device)
    so_far = start or Start(out, lse)
    programs = call.sizes[0] * -(-q.shape[2] // blocks.rows)
    if programs:
        begun = (laid(so_far.out), laid(so_far.lse), so_far.top)
        given = (*map(laid, (q, k, v, out, lse)), begun, call.table, call.reach(lse), call.chunk)
        whole = (out, lse, so_far.out, so_far.lse)
        key = (*call.key, *map(shape, whole), so_far.top, start is None, blocks)
        how = {"STARTED": start is not None, "CHUNKED": part.chunk is not None}
        launch(
            _kernel, programs, (*given, call.sizes, call.scales), (*call.tensors, *whole), key,
            lambda: call.constants(blocks) | how,
        )  # fmt: skip
    return out, lse
