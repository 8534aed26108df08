"""The parts of a gradient, rotated back and added up in one launch: each element is read once, the
sum is kept in float32, rounded once and written once.

x₁ = Σ y₁ cos + y₂ sin, x₂ = Σ y₂ cos - y₁ sin over the parts that cover a row, each with its own
tables. A part covers evenly spaced windows of rows. The kernel computes which window a row lies in
and its index there (counted from the bottom if the tile ran reversed), so parts are read in the
layout their kernel wrote. Loads are masked, not branched around, so that those of all parts are in
flight at once. Reference: `lse_merge.GradientSum`.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from longitude.ops.kernels.launch import launch, require
from longitude.ops.kernels.rope import Blocks, blocks_for, chunks_of, position_of_program
from longitude.ops.lse_merge import GradientPart
from longitude.ops.passes import dense
from longitude.parts.rope import Pairs

MAX_PARTS = 6  # per launch: more would not stay in registers


@triton.jit
@no_type_check
def _kernel(parts, out, heads, tokens, groups, lanes, chunk, ob, oh, on, HALF: tl.constexpr,
            REST: tl.constexpr, ADJACENT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
            WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """Add up the parts for one block of tokens and HEADS heads."""
    block, lane = position_of_program(lanes, chunk)
    batch = (lane // groups).to(tl.int64)
    head = ((lane % groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    row = block * TOKENS + tl.arange(0, TOKENS)
    pair, both = tl.arange(0, WIDTH)[None, None, :], tl.arange(0, 2 * WIDTH)[None, None, :]
    rest = 2 * HALF + tl.arange(0, REST_WIDTH)[None, None, :]
    valid, is_rest = head < heads, rest < 2 * HALF + REST
    sum_a = tl.zeros((HEADS, TOKENS, WIDTH), tl.float32)
    sum_b = tl.zeros((HEADS, TOKENS, WIDTH), tl.float32)
    sum_rest = tl.zeros((HEADS, TOKENS, REST_WIDTH), tl.float32)
    for n in tl.static_range(len(parts)):
        x, cos, sin, start, step, count, height, flipped, xt, xb, xh, xn, tb, tn = parts[n]
        offset = row - start
        tile = offset // step
        within = offset - tile * step
        covered = (row < tokens) & (offset >= 0) & (tile < count) & (within < height)
        within = tl.where(flipped != 0, height - 1 - within, within).to(tl.int64)
        at = (x + batch * xb + tile.to(tl.int64) * xt + within * xn)[None, :, None] + head * xh
        covered = covered[None, :, None]
        if HALF:
            angle = batch * tb + row.to(tl.int64)[None, :, None] * tn + pair
            c = tl.load(cos + angle, mask=covered & (pair < HALF), other=0.0,
                        eviction_policy="evict_last")  # fmt: skip
            s = tl.load(sin + angle, mask=covered & (pair < HALF), other=0.0,
                        eviction_policy="evict_last")  # fmt: skip
            if ADJACENT:
                loaded = tl.load(at + both, mask=covered & valid & (both < 2 * HALF), other=0.0)
                a, b = tl.split(tl.reshape(loaded.to(tl.float32), (HEADS, TOKENS, WIDTH, 2)))
            else:
                a = tl.load(at + pair, mask=covered & valid & (pair < HALF), other=0.0)
                b = tl.load(at + HALF + pair, mask=covered & valid & (pair < HALF), other=0.0)
                a, b = a.to(tl.float32), b.to(tl.float32)
            sum_a += a * c + b * s
            sum_b += b * c - a * s
        if REST:  # dimensions that are not rotated
            sum_rest += tl.load(at + rest, mask=covered & valid & is_rest, other=0.0).to(tl.float32)
    pointers = out + batch * ob + head * oh + row.to(tl.int64)[None, :, None] * on
    valid = valid & (row < tokens)[None, :, None]
    if HALF:
        if ADJACENT:
            joined = tl.reshape(tl.join(sum_a, sum_b), (HEADS, TOKENS, 2 * WIDTH))
            tl.store(pointers + both, joined, mask=valid & (both < 2 * HALF))
        else:
            tl.store(pointers + pair, sum_a, mask=valid & (pair < HALF))
            tl.store(pointers + HALF + pair, sum_b, mask=valid & (pair < HALF))
    if REST:
        tl.store(pointers + rest, sum_rest, mask=valid & is_rest)


def add_up(
    parts: list[GradientPart], like: Tensor, pairs: Pairs = "half", blocks: Blocks | None = None
) -> Tensor:
    """Return the sum of parts (all with tables or all without), in the memory layout of `like`."""
    require(like)
    if len(parts) > MAX_PARTS:
        wide = torch.empty_like(like, dtype=torch.float32)
        sums = (add_up(group, wide, pairs) for group in (parts[:MAX_PARTS], parts[MAX_PARTS:]))
        parts = [GradientPart(x[None], [0]) for x in sums]
    out = torch.empty_like(like)
    out = out if out.stride(-1) == 1 else out.new_empty(out.shape)
    parts = [part for part in parts if part.x.numel()]
    if not parts or not out.numel():
        return out.zero_()
    (b, h, n, d), xs = out.shape, dense(*(part.x for part in parts))
    tables = [[t.contiguous() for t in part.tables or (out, out)] for part in parts]
    half = 0 if parts[0].tables is None else tables[0][0].shape[3]
    width, rest_width = (triton.next_power_of_2(max(size, 1)) for size in (half, d - 2 * half))
    blocks = blocks or blocks_for([out.shape], out.element_size())
    groups = triton.cdiv(h, blocks.heads)
    table_bytes = 2 * half * tables[0][0].element_size() * len(parts)
    heads_first = out.stride(1) > out.stride(2)
    chunk, runs = chunks_of(n, blocks.tokens, heads_first, table_bytes)
    constants = {
        "HALF": half, "REST": d - 2 * half, "ADJACENT": pairs == "adjacent",
        "TOKENS": blocks.tokens, "HEADS": blocks.heads, "WIDTH": width, "REST_WIDTH": rest_width,
        "num_warps": blocks.warps,
    }  # fmt: skip
    numbers = (h, n, groups, b * groups, chunk, *out.stride()[:3])
    places = [_numbers(part, x, table[0]) for part, x, table in zip(parts, xs, tables, strict=True)]
    args = tuple((x, *table, *place) for x, table, place in zip(xs, tables, places, strict=True))
    tensors = (out, *xs, *(t for table in tables for t in table))
    key = (*(x.dtype for x in tensors), numbers, *places, *constants.values())
    launch(_kernel, (runs * b * groups, 1, 1), (args, out, *numbers), tensors, key,
           lambda: constants)  # fmt: skip
    return out


def _numbers(part: GradientPart, x: Tensor, table: Tensor) -> tuple[int, ...]:
    """The position of a part's windows, and the strides of the part and its tables."""
    starts, size = part.starts, x.shape[3]
    step = starts[1] - starts[0] if len(starts) > 1 else size
    by_batch = table.stride(0) if table.shape[0] > 1 else 0
    place = (starts[0], step, len(starts), size, int(part.flipped))
    return *place, *x.stride()[:4], by_batch, table.stride(2)
