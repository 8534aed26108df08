"""Gradients of attention under a bias of the distance: of q, of k and v, and of the bias's table.

p = e^(score - lse), dv = pᵀ·dout, ds = p (dout·vᵀ - Σ dout·out), dq = scale ds·k, dk = scale dsᵀ·q,
each tile's scores recomputed. Rows run for dq, columns for dk and dv (a group's queries add up in
registers), and diagonals for the table: tiles at one distance are added up entry by entry in
registers, so that a full diagonal ends in one tile of additions to memory rather than one for every
pair. With the output and log-sum-exp of a softmax
over several bands these are the gradients of that softmax.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from longitude.ops.bands import BandCall, BandGradients, BandKernels
from longitude.ops.kernels.banded import (
    Blocks,
    LaunchCall,
    banded,
    bias_of,
    bias_tile,
    laid,
    load_tile,
    spans,
    store_tile,
    tile_of,
)
from longitude.ops.kernels.launch import launch, shape
from longitude.ops.passes import dense

STRIP = 32  # tiles of a diagonal that one program adds up


class BlockPlan(NamedTuple):
    """The blocks of each kernel; a diagonal's are square."""

    rows: Blocks
    columns: Blocks
    diagonals: Blocks


def blocks_for(q: Tensor, v: Tensor) -> BlockPlan:
    """The blocks for a head size."""
    d = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32:
        one = Blocks(32, 32, 8, 1) if d <= 128 else Blocks(16, 16, 4, 1)
        return BlockPlan(one, one, one)
    if d <= 64:
        return BlockPlan(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3), Blocks(64, 64, 4, 3))
    if d <= 128:
        return BlockPlan(Blocks(128, 64, 8, 2), Blocks(32, 128, 8, 2), Blocks(64, 64, 4, 2))
    return BlockPlan(Blocks(128, 32, 8, 1), Blocks(32, 64, 8, 2), Blocks(64, 64, 8, 1))


@triton.jit
@no_type_check
def _sums(lse, delta, batch, head, begin, n, log2e, ROWS: tl.constexpr):
    """The log-sum-exp, in powers of two, and Σ dout·out of some rows; past their end, and where a
    row sees nothing, infinity lets no weight through."""
    row = begin + tl.arange(0, ROWS)
    sums = tl.load(tile_of(lse, batch, head) + row, mask=row < n, other=float("inf")) * log2e
    sums = tl.where(sums == float("-inf"), float("inf"), sums)
    return sums, tl.load(tile_of(delta, batch, head) + row, mask=row < n, other=0.0)


@triton.jit
@no_type_check
def _rows_span(acc, q, grad, k, v, sums, delta, edges, begin, end, table, scale, D: tl.constexpr,
               DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the columns begin … end-1 to the gradient of these rows."""
    k, k_token = k
    v, v_token = v
    at, m, lo, hi = edges
    for left in tl.range(begin, end, COLUMNS):
        keys = load_tile(k, k_token, left, m, D, COLUMNS, WIDTH, MASKED)
        values = load_tile(v, v_token, left, m, DV, COLUMNS, WIDTH_V, MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if RUN:
            s += bias_tile(table, at - left - COLUMNS + 1, ROWS, COLUMNS, RUN, False)
        p = tl.exp2(s - sums[:, None])
        if MASKED:
            columns = left + tl.arange(0, COLUMNS)
            away = at + tl.arange(0, ROWS)[:, None] - columns[None, :]
            p = tl.where((away >= lo) & (away < hi) & (columns < m)[None, :], p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(values), input_precision="ieee") - delta[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton.jit
@no_type_check
def _rows_kernel(q, k, v, out, lse, grad, delta, dq, table, reach, sizes, scales, D: tl.constexpr,
                 DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr,
                 REACH: tl.constexpr):  # fmt: skip
    """The gradient of one block of rows, and their Σ dout·out for the other kernels."""
    lanes, heads, group, n, m, lo, hi = sizes
    scale, log2e = scales
    lane = tl.program_id(0) % lanes
    at = (tl.cdiv(n, ROWS) - 1 - tl.program_id(0) // lanes) * ROWS
    batch, head = lane // heads, lane % heads
    tile = load_tile(tile_of(q, batch, head), q[3], at, n, D, ROWS, WIDTH, True)
    dout = load_tile(tile_of(grad, batch, head), grad[3], at, n, DV, ROWS, WIDTH_V, True)
    made = load_tile(tile_of(out, batch, head), out[3], at, n, DV, ROWS, WIDTH_V, True)
    sums, _ = _sums(lse, lse, batch, head, at, n, log2e, ROWS)
    total = tl.sum(dout.to(tl.float32) * made.to(tl.float32), 1)
    rows = at + tl.arange(0, ROWS)
    tl.store(tile_of(delta, batch, head) + rows, total, mask=rows < n)
    far = tl.load(reach + lane) if REACH else n
    ends = spans(at, ROWS, n, m, lo, hi, far, COLUMNS)
    own = head // group
    keys, values = (tile_of(k, batch, own), k[3]), (tile_of(v, batch, own), v[3])
    bias, edges = bias_of(table, head, log2e), (at, m, lo, hi)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for span in tl.static_range(3):
        if span > 0 or WINDOW:
            acc = _rows_span(acc, tile, dout, keys, values, sums, total, edges, ends[span],
                             ends[span + 1], bias, scale, D, DV, WIDTH, WIDTH_V, ROWS, COLUMNS,
                             RUN, span != 1)  # fmt: skip
    store_tile(dq, batch, head, at, n, acc * (scale / log2e), D, ROWS, WIDTH)


@triton.jit
@no_type_check
def _columns_span(dk, dv, k, v, q, grad, lse, delta, lane, edges, begin, end, table, scales,
                  D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    """Add the rows begin … end-1 of one head to the gradients of these columns."""
    scale, log2e = scales
    batch, head = lane
    at, n, lo, hi = edges
    q_head, grad_head = tile_of(q, batch, head), tile_of(grad, batch, head)
    for top in tl.range(begin, end, ROWS):
        tile = load_tile(q_head, q[3], top, n, D, ROWS, WIDTH, MASKED)
        dout = load_tile(grad_head, grad[3], top, n, DV, ROWS, WIDTH_V, MASKED)
        sums, total = _sums(lse, delta, batch, head, top, n, log2e, ROWS)
        s = tl.dot(k, tl.trans(tile), input_precision="ieee") * scale
        if RUN:
            s += bias_tile(table, top - at - COLUMNS + 1, ROWS, COLUMNS, RUN, True)
        p = tl.exp2(s - sums[None, :])
        if MASKED:
            away = top + tl.arange(0, ROWS)[None, :] - at - tl.arange(0, COLUMNS)[:, None]
            p = tl.where((away >= lo) & (away < hi), p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - total[None, :])
        dk = tl.dot(ds.to(tile.dtype), tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
@no_type_check
def _columns_kernel(q, k, v, lse, grad, delta, dk, dv, table, reach, sizes, scales,
                    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
                    WINDOW: tl.constexpr, REACH: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """The gradients of one block of columns, over every query head that shares them."""
    lanes, heads, group, n, m, lo, hi = sizes
    shared = lanes // group
    lane, at = tl.program_id(0) % shared, tl.program_id(0) // shared * COLUMNS
    batch, own = lane // (heads // group), lane % (heads // group)
    keys = load_tile(tile_of(k, batch, own), k[3], at, m, D, COLUMNS, WIDTH, True)
    values = load_tile(tile_of(v, batch, own), v[3], at, m, DV, COLUMNS, WIDTH_V, True)
    of_k, of_v = tl.zeros((COLUMNS, WIDTH), tl.float32), tl.zeros((COLUMNS, WIDTH_V), tl.float32)
    for one in range(0, group):
        head = own * group + one
        # seen from a column, rows are a band too: 1 - hi <= j - i < 1 - lo
        begin, inner, seen, end = spans(at, COLUMNS, m, n, 1 - hi, 1 - lo, 1 - lo, ROWS)
        if REACH:
            far = at + COLUMNS - 1 + tl.load(reach + batch * heads + head)
            end = tl.minimum(end, tl.maximum(begin, far))
            seen = tl.minimum(seen, tl.cdiv(end, ROWS) * ROWS)
        bias, edges = bias_of(table, head, scales[1]), (at, n, lo, hi)
        ends = begin, inner, seen, end
        for span in tl.static_range(3):
            if span < 2 or TAIL:
                of_k, of_v = _columns_span(
                    of_k, of_v, keys, values, q, grad, lse, delta, (batch, head), edges, ends[span],
                    ends[span + 1], bias, scales, D, DV, WIDTH, WIDTH_V, ROWS, COLUMNS, RUN,
                    span != 1)  # fmt: skip
    store_tile(dk, batch, own, at, m, of_k * (scales[0] / scales[1]), D, COLUMNS, WIDTH)
    store_tile(dv, batch, own, at, m, of_v, DV, COLUMNS, WIDTH_V)


@triton.jit
@no_type_check
def _diagonals_kernel(q, k, v, lse, grad, delta, dtable, table, reach, sizes, scales, least, near,
                      strips, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
                      WIDTH_V: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
                      STRIP: tl.constexpr, REACH: tl.constexpr):  # fmt: skip
    """The gradient of the table from one strip of a diagonal of tiles, for distances below
    `near`."""
    lanes, heads, group, n, m, lo, _ = sizes
    scale, log2e = scales
    lane, rest = tl.program_id(0) % lanes, tl.program_id(0) // lanes
    diagonal, strip = least + rest // strips * SIZE, rest % strips
    batch, head = lane // heads, lane % heads
    q_head, grad_head = tile_of(q, batch, head), tile_of(grad, batch, head)
    k_head, v_head = tile_of(k, batch, head // group), tile_of(v, batch, head // group)
    bias = bias_tile(bias_of(table, head, log2e), diagonal - SIZE + 1, SIZE, SIZE, RUN, False)
    far = tl.load(reach + lane) if REACH else n
    begin = tl.maximum(diagonal, 0) + strip * STRIP * SIZE
    end = tl.minimum(tl.minimum(n, m + diagonal), begin + STRIP * SIZE)
    end = tl.where(diagonal - SIZE < far, end, begin)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    away = diagonal + tl.arange(0, SIZE)[:, None] - tl.arange(0, SIZE)[None, :]
    for top in tl.range(begin, end, SIZE):
        tile = load_tile(q_head, q[3], top, n, D, SIZE, WIDTH, True)
        keys = load_tile(k_head, k[3], top - diagonal, m, D, SIZE, WIDTH, True)
        dout = load_tile(grad_head, grad[3], top, n, DV, SIZE, WIDTH_V, True)
        values = load_tile(v_head, v[3], top - diagonal, m, DV, SIZE, WIDTH_V, True)
        sums, product = _sums(lse, delta, batch, head, top, n, log2e, SIZE)
        s = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale + bias
        seen = (away >= lo) & (away < near) & (top - diagonal + tl.arange(0, SIZE) < m)[None, :]
        p = tl.where(seen, tl.exp2(s - sums[:, None]), 0.0)
        total += p * (tl.dot(dout, tl.trans(values), input_precision="ieee") - product[:, None])
    row, by_head, first, _ = dtable
    where = row + tl.cast(head, tl.int64) * by_head + (away - first)
    tl.atomic_add(where, total, mask=(away >= lo) & (away < near), sem="relaxed")


def backward(part: BandCall, grad: Tensor, out: Tensor, lse: Tensor, table: bool = False,
             wide: bool = False, plan: BlockPlan | None = None) -> BandGradients:  # fmt: skip
    """Gradients of a band; in float32 where wide.

    The table's last entry is left out where it holds on for distances beyond: a row's ds add up to
    nothing, so its gradient is what the others lack.
    """
    call = LaunchCall.of(part)
    q, k, v = call.part[:3]
    plan = plan or blocks_for(q, v)
    grad, out = dense(grad, out)
    lse = lse.float().contiguous()
    made = [torch.empty_like(x, dtype=torch.float32 if wide else x.dtype) for x in (q, k, v)]
    bias = call.part.bias
    d_table = torch.zeros_like(bias.table) if table and bias is not None else None
    if not q.numel() or not k.numel():
        return BandGradients(made[0].zero_(), made[1].zero_(), made[2].zero_(), d_table)
    delta = torch.empty_like(lse)
    rest = (call.table, call.reach, call.sizes, call.scales)
    given = [laid(x) for x in (q, k, v, out, lse, grad, delta)]
    batch, kv, m, _ = k.shape
    tensors = (*call.tensors, out, lse, grad, delta, *made)
    key = (*call.key, shape(out), shape(grad), *map(shape, made), plan)
    programs = call.sizes[0] * triton.cdiv(q.shape[2], plan.rows.rows)
    launch(_rows_kernel, (programs, 1, 1), (*given, laid(made[0]), *rest), tensors, key,
           lambda: call.constants(plan.rows))  # fmt: skip
    del given[3]
    # full blocks of rows up to the last have no edge there
    tail = call.part.band.hi < q.shape[2] or q.shape[2] % plan.columns.rows != 0
    programs = batch * kv * triton.cdiv(m, plan.columns.columns)
    launch(_columns_kernel, (programs, 1, 1), (*given, laid(made[1]), laid(made[2]), *rest),
           tensors, key, lambda: call.constants(plan.columns) | {"TAIL": tail})  # fmt: skip
    if bias is not None and d_table is not None:
        size, (lo, hi) = plan.diagonals.rows, call.part.band
        near = bias.flat if hi > bias.flat + 1 else hi
        least, count = lo // size * size, -(-(near - 1) // size) - lo // size + 1
        strips = triton.cdiv(triton.cdiv(min(q.shape[2], m), size) + 1, STRIP)
        row = (d_table, d_table.stride(0), bias.first, d_table.shape[1])
        if near > lo:
            launch(_diagonals_kernel, (call.sizes[0] * count * strips, 1, 1),
                   (*given, row, *rest, least, near, strips), (*tensors, d_table), key,
                   lambda: _square(call.constants(plan.diagonals)))  # fmt: skip
    return BandGradients(made[0], made[1], made[2], d_table)


def _square(constants: dict[str, Any]) -> dict[str, Any]:
    """Of square tiles, which no edge of a window concerns."""
    others = {n: x for n, x in constants.items() if n not in ("ROWS", "COLUMNS", "WINDOW")}
    return others | {"SIZE": constants["ROWS"], "STRIP": STRIP}


@cache
def _hopper() -> Any:
    return import_module("longitude.ops.kernels.hopper_launch")  # late: on Hopper alone


KERNELS = BandKernels(banded, backward, lambda *call: _hopper().together(*call))
