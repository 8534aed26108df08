"""Gradients of attention with a bias of the distance: of q, of k and v, and of the bias's table.

p = e^(score - lse), dv = pᵀ·dout, ds = p (dout·vᵀ - Σ dout·out), dq = scale ds·k, dk = scale dsᵀ·q,
with each tile's scores recomputed. One kernel takes blocks of rows for dq, one takes blocks of
columns for dk and dv (summed in registers over the query heads of a group), and one takes diagonals
for the table: tiles at one distance are summed entry by entry in registers, so that a strip of a
diagonal ends in one tile of atomic additions rather than in one addition per pair. Given the output
and log-sum-exp of a softmax over several bands, these are the gradients of that softmax.
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

STRIP = 32  # tiles of a diagonal that one program sums


class BlockPlan(NamedTuple):
    """The blocks of each kernel; those of `diagonals` are square."""

    rows: Blocks
    columns: Blocks
    diagonals: Blocks


def blocks_for(q: Tensor, v: Tensor) -> BlockPlan:
    """The blocks for a head size."""
    d = max(q.shape[-1], v.shape[-1])
    if q.dtype == torch.float32:
        blocks = Blocks(32, 32, 8, 1) if d <= 128 else Blocks(16, 16, 4, 1)
        return BlockPlan(blocks, blocks, blocks)
    if d <= 64:
        return BlockPlan(Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 3), Blocks(64, 64, 4, 3))
    if d <= 128:
        return BlockPlan(Blocks(128, 64, 8, 2), Blocks(32, 128, 8, 2), Blocks(64, 64, 4, 2))
    return BlockPlan(Blocks(128, 32, 8, 1), Blocks(32, 64, 8, 2), Blocks(64, 64, 8, 1))


@triton.jit
@no_type_check
def _sums(lse, delta, batch, head, begin, n, log2e, ROWS: tl.constexpr):
    """The log-sum-exp in base 2 and Σ dout·out of a block of rows. Past row n, and for rows that
    see no key, the log-sum-exp is infinite, so that every weight is zero."""
    row = begin + tl.arange(0, ROWS)
    row_lse = tl.load(tile_of(lse, batch, head) + row, mask=row < n, other=float("inf")) * log2e
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    return row_lse, tl.load(tile_of(delta, batch, head) + row, mask=row < n, other=0.0)


@triton.jit
@no_type_check
def _rows_span(acc, q, grad, k, v, sums, delta, edges, begin, end, table, scale, D: tl.constexpr,
               DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
               COLUMNS: tl.constexpr, RUN: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add what columns begin … end-1 contribute to the gradient of these rows."""
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
            dist = at + tl.arange(0, ROWS)[:, None] - columns[None, :]
            p = tl.where((dist >= lo) & (dist < hi) & (columns < m)[None, :], p, 0.0)
        ds = p * (tl.dot(grad, tl.trans(values), input_precision="ieee") - delta[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton.jit
@no_type_check
def _rows_kernel(q, k, v, out, lse, grad, delta, dq, table, reach, sizes, scales, D: tl.constexpr,
                 DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, RUN: tl.constexpr, WINDOW: tl.constexpr,
                 REACH: tl.constexpr):  # fmt: skip
    """The gradient dq of one block of rows, and their Σ dout·out for the other kernels."""
    lanes, heads, group, n, m, lo, hi = sizes
    scale, log2e = scales
    lane = tl.program_id(0) % lanes
    at = (tl.cdiv(n, ROWS) - 1 - tl.program_id(0) // lanes) * ROWS
    batch, head = lane // heads, lane % heads
    tile = load_tile(tile_of(q, batch, head), q[3], at, n, D, ROWS, WIDTH, True)
    dout = load_tile(tile_of(grad, batch, head), grad[3], at, n, DV, ROWS, WIDTH_V, True)
    o_tile = load_tile(tile_of(out, batch, head), out[3], at, n, DV, ROWS, WIDTH_V, True)
    row_lse, _ = _sums(lse, lse, batch, head, at, n, log2e, ROWS)
    row_delta = tl.sum(dout.to(tl.float32) * o_tile.to(tl.float32), 1)
    rows = at + tl.arange(0, ROWS)
    tl.store(tile_of(delta, batch, head) + rows, row_delta, mask=rows < n)
    max_distance = tl.load(reach + lane) if REACH else n
    ends = spans(at, ROWS, n, m, lo, hi, max_distance, COLUMNS)
    kv_head = head // group
    keys, values = (tile_of(k, batch, kv_head), k[3]), (tile_of(v, batch, kv_head), v[3])
    bias, edges = bias_of(table, head, log2e), (at, m, lo, hi)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for span in tl.static_range(3):
        if span > 0 or WINDOW:
            acc = _rows_span(acc, tile, dout, keys, values, row_lse, row_delta, edges, ends[span],
                             ends[span + 1], bias, scale, D, DV, WIDTH, WIDTH_V, ROWS, COLUMNS,
                             RUN, span != 1)  # fmt: skip
    store_tile(dq, batch, head, at, n, acc * (scale / log2e), D, ROWS, WIDTH)


@triton.jit
@no_type_check
def _columns_span(dk, dv, k, v, q, grad, lse, delta, lane, edges, begin, end, table, scales,
                  D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
                  MASKED: tl.constexpr):  # fmt: skip
    """Add what rows begin … end-1 of one head contribute to the gradients of these columns."""
    scale, log2e = scales
    batch, head = lane
    at, n, lo, hi = edges
    q_head, grad_head = tile_of(q, batch, head), tile_of(grad, batch, head)
    for top in tl.range(begin, end, ROWS):
        tile = load_tile(q_head, q[3], top, n, D, ROWS, WIDTH, MASKED)
        dout = load_tile(grad_head, grad[3], top, n, DV, ROWS, WIDTH_V, MASKED)
        row_lse, row_delta = _sums(lse, delta, batch, head, top, n, log2e, ROWS)
        s = tl.dot(k, tl.trans(tile), input_precision="ieee") * scale
        if RUN:
            s += bias_tile(table, top - at - COLUMNS + 1, ROWS, COLUMNS, RUN, True)
        p = tl.exp2(s - row_lse[None, :])
        if MASKED:
            dist = top + tl.arange(0, ROWS)[None, :] - at - tl.arange(0, COLUMNS)[:, None]
            p = tl.where((dist >= lo) & (dist < hi), p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(dout), input_precision="ieee") - row_delta[None, :])
        dk = tl.dot(ds.to(tile.dtype), tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
@no_type_check
def _columns_kernel(q, k, v, lse, grad, delta, dk, dv, table, reach, sizes, scales,
                    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
                    WINDOW: tl.constexpr, REACH: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """The gradients dk and dv of one block of columns, over all query heads that share them."""
    lanes, heads, group, n, m, lo, hi = sizes
    shared = lanes // group
    lane, at = tl.program_id(0) % shared, tl.program_id(0) // shared * COLUMNS
    batch, kv_head = lane // (heads // group), lane % (heads // group)
    keys = load_tile(tile_of(k, batch, kv_head), k[3], at, m, D, COLUMNS, WIDTH, True)
    values = load_tile(tile_of(v, batch, kv_head), v[3], at, m, DV, COLUMNS, WIDTH_V, True)
    of_k, of_v = tl.zeros((COLUMNS, WIDTH), tl.float32), tl.zeros((COLUMNS, WIDTH_V), tl.float32)
    for member in range(0, group):
        head = kv_head * group + member
        # the rows of a column form a band as well: 1 - hi <= j - i < 1 - lo
        begin, full_begin, full_end, end = spans(at, COLUMNS, m, n, 1 - hi, 1 - lo, 1 - lo, ROWS)
        if REACH:
            row_limit = at + COLUMNS - 1 + tl.load(reach + batch * heads + head)
            end = tl.minimum(end, tl.maximum(begin, row_limit))
            full_end = tl.minimum(full_end, tl.cdiv(end, ROWS) * ROWS)
        bias, edges = bias_of(table, head, scales[1]), (at, n, lo, hi)
        ends = begin, full_begin, full_end, end
        for span in tl.static_range(3):
            if span < 2 or TAIL:
                of_k, of_v = _columns_span(
                    of_k, of_v, keys, values, q, grad, lse, delta, (batch, head), edges, ends[span],
                    ends[span + 1], bias, scales, D, DV, WIDTH, WIDTH_V, ROWS, COLUMNS, RUN,
                    span != 1)  # fmt: skip
    store_tile(dk, batch, kv_head, at, m, of_k * (scales[0] / scales[1]), D, COLUMNS, WIDTH)
    store_tile(dv, batch, kv_head, at, m, of_v, DV, COLUMNS, WIDTH_V)


@triton.jit
@no_type_check
def _diagonals_kernel(q, k, v, lse, grad, delta, dtable, table, reach, sizes, scales, least, near,
                      strips, D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr,
                      WIDTH_V: tl.constexpr, SIZE: tl.constexpr, RUN: tl.constexpr,
                      STRIP: tl.constexpr, REACH: tl.constexpr):  # fmt: skip
    """Add one strip of a diagonal of tiles to the gradient of the table, for distances below
    `near`."""
    lanes, heads, group, n, m, lo, _ = sizes
    scale, log2e = scales
    lane, index = tl.program_id(0) % lanes, tl.program_id(0) // lanes
    diagonal, strip = least + index // strips * SIZE, index % strips
    batch, head = lane // heads, lane % heads
    q_head, grad_head = tile_of(q, batch, head), tile_of(grad, batch, head)
    k_head, v_head = tile_of(k, batch, head // group), tile_of(v, batch, head // group)
    bias = bias_tile(bias_of(table, head, log2e), diagonal - SIZE + 1, SIZE, SIZE, RUN, False)
    max_distance = tl.load(reach + lane) if REACH else n
    begin = tl.maximum(diagonal, 0) + strip * STRIP * SIZE
    end = tl.minimum(tl.minimum(n, m + diagonal), begin + STRIP * SIZE)
    end = tl.where(diagonal - SIZE < max_distance, end, begin)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    dist = diagonal + tl.arange(0, SIZE)[:, None] - tl.arange(0, SIZE)[None, :]
    for top in tl.range(begin, end, SIZE):
        tile = load_tile(q_head, q[3], top, n, D, SIZE, WIDTH, True)
        keys = load_tile(k_head, k[3], top - diagonal, m, D, SIZE, WIDTH, True)
        dout = load_tile(grad_head, grad[3], top, n, DV, SIZE, WIDTH_V, True)
        values = load_tile(v_head, v[3], top - diagonal, m, DV, SIZE, WIDTH_V, True)
        row_lse, row_delta = _sums(lse, delta, batch, head, top, n, log2e, SIZE)
        s = tl.dot(tile, tl.trans(keys), input_precision="ieee") * scale + bias
        visible = (dist >= lo) & (dist < near) & (top - diagonal + tl.arange(0, SIZE) < m)[None, :]
        p = tl.where(visible, tl.exp2(s - row_lse[:, None]), 0.0)
        total += p * (tl.dot(dout, tl.trans(values), input_precision="ieee") - row_delta[:, None])
    pointer, by_head, first, _ = dtable
    pointers = pointer + tl.cast(head, tl.int64) * by_head + (dist - first)
    tl.atomic_add(pointers, total, mask=(dist >= lo) & (dist < near), sem="relaxed")


def backward(part: BandCall, grad: Tensor, out: Tensor, lse: Tensor, table: bool = False,
             wide: bool = False, plan: BlockPlan | None = None) -> BandGradients:  # fmt: skip
    """Gradients of a band, in float32 if `wide`.

    The table's last entry gets none if it also holds at larger distances. The ds of a row sum to
    zero, so the caller can derive that gradient from those of the other entries.
    """
    call = LaunchCall.of(part)
    q, k, v = call.part[:3]
    plan = plan or blocks_for(q, v)
    grad, out = dense(grad, out)
    lse = lse.float().contiguous()
    grads = [torch.empty_like(x, dtype=torch.float32 if wide else x.dtype) for x in (q, k, v)]
    bias = call.part.bias
    d_table = torch.zeros_like(bias.table) if table and bias is not None else None
    if not q.numel() or not k.numel():
        return BandGradients(grads[0].zero_(), grads[1].zero_(), grads[2].zero_(), d_table)
    delta = torch.empty_like(lse)
    common = (call.table, call.reach, call.sizes, call.scales)
    args = [laid(x) for x in (q, k, v, out, lse, grad, delta)]
    batch, kv_heads, m, _ = k.shape
    tensors = (*call.tensors, out, lse, grad, delta, *grads)
    key = (*call.key, shape(out), shape(grad), *map(shape, grads), plan)
    programs = call.sizes[0] * triton.cdiv(q.shape[2], plan.rows.rows)
    launch(_rows_kernel, (programs, 1, 1), (*args, laid(grads[0]), *common), tensors, key,
           lambda: call.constants(plan.rows))  # fmt: skip
    del args[3]
    # the last span has rows only if there is a window or the last block of rows is not full
    tail = call.part.band.hi < q.shape[2] or q.shape[2] % plan.columns.rows != 0
    programs = batch * kv_heads * triton.cdiv(m, plan.columns.columns)
    launch(_columns_kernel, (programs, 1, 1), (*args, laid(grads[1]), laid(grads[2]), *common),
           tensors, key, lambda: call.constants(plan.columns) | {"TAIL": tail})  # fmt: skip
    if bias is not None and d_table is not None:
        size, (lo, hi) = plan.diagonals.rows, call.part.band
        near = bias.flat if hi > bias.flat + 1 else hi
        least, count = lo // size * size, -(-(near - 1) // size) - lo // size + 1
        strips = triton.cdiv(triton.cdiv(min(q.shape[2], m), size) + 1, STRIP)
        table_args = (d_table, d_table.stride(0), bias.first, d_table.shape[1])
        if near > lo:
            launch(_diagonals_kernel, (call.sizes[0] * count * strips, 1, 1),
                   (*args, table_args, *common, least, near, strips), (*tensors, d_table), key,
                   lambda: _square(call.constants(plan.diagonals)))  # fmt: skip
    return BandGradients(grads[0], grads[1], grads[2], d_table)


def _square(constants: dict[str, Any]) -> dict[str, Any]:
    """The constants of a kernel of square tiles, which has no use for WINDOW."""
    others = {n: x for n, x in constants.items() if n not in ("ROWS", "COLUMNS", "WINDOW")}
    return others | {"SIZE": constants["ROWS"], "STRIP": STRIP}


@cache
def _hopper() -> Any:
    return import_module("longitude.ops.kernels.hopper_launch")  # late: for Hopper GPUs only


KERNELS = BandKernels(banded, backward, lambda *call: _hopper().together(*call))
