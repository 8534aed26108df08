"""The parts of a gradient rotated back and added up in one launch: each number is read once, the
sum is kept in float32, rounded once and written once.

x₁ = Σ y₁ cos + y₂ sin, x₂ = Σ y₂ cos - y₁ sin over the parts that cover a row, each by its own
tables. A part covers windows of rows evenly spaced; which window a row lies in, and which of its
rows it is (counted from the bottom where a tile ran reversed), is worked out here, so parts are
read where and how their kernel left them. Loads are masked, not branched around: those of all parts
are under way at once. Reference: `lse_merge.GradientSum`.
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

MAX_PARTS = 6  # that one launch adds up: those of more would not stay in registers


@triton.jit
@no_type_check
def _kernel(parts, out, heads, tokens, groups, lanes, chunk, ob, oh, on, HALF: tl.constexpr,
            REST: tl.constexpr, ADJACENT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
            WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """A run of tokens of some heads."""
    block, lane = position_of_program(lanes, chunk)
    batch = (lane // groups).to(tl.int64)
    head = ((lane % groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    row = block * TOKENS + tl.arange(0, TOKENS)
    pair, both = tl.arange(0, WIDTH)[None, None, :], tl.arange(0, 2 * WIDTH)[None, None, :]
    rest = 2 * HALF + tl.arange(0, REST_WIDTH)[None, None, :]
    here, left = head < heads, rest < 2 * HALF + REST
    one = tl.zeros((HEADS, TOKENS, WIDTH), tl.float32)
    two = tl.zeros((HEADS, TOKENS, WIDTH), tl.float32)
    same = tl.zeros((HEADS, TOKENS, REST_WIDTH), tl.float32)
    for n in tl.static_range(len(parts)):
        x, cos, sin, start, step, count, height, flipped, xt, xb, xh, xn, tb, tn = parts[n]
        away = row - start
        tile = away // step
        within = away - tile * step
        covered = (row < tokens) & (away >= 0) & (tile < count) & (within < height)
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
                found = tl.load(at + both, mask=covered & here & (both < 2 * HALF), other=0.0)
                a, b = tl.split(tl.reshape(found.to(tl.float32), (HEADS, TOKENS, WIDTH, 2)))
            else:
                a = tl.load(at + pair, mask=covered & here & (pair < HALF), other=0.0)
                b = tl.load(at + HALF + pair, mask=covered & here & (pair < HALF), other=0.0)
                a, b = a.to(tl.float32), b.to(tl.float32)
            one += a * c + b * s
            two += b * c - a * s
        if REST:  # what no table rotates
            same += tl.load(at + rest, mask=covered & here & left, other=0.0).to(tl.float32)
    to = out + batch * ob + head * oh + row.to(tl.int64)[None, :, None] * on
    here = here & (row < tokens)[None, :, None]
    if HALF:
        if ADJACENT:
            joined = tl.reshape(tl.join(one, two), (HEADS, TOKENS, 2 * WIDTH))
            tl.store(to + both, joined, mask=here & (both < 2 * HALF))
        else:
            tl.store(to + pair, one, mask=here & (pair < HALF))
            tl.store(to + HALF + pair, two, mask=here & (pair < HALF))
    if REST:
        tl.store(to + rest, same, mask=here & left)


def add_up(
    parts: list[GradientPart], like: Tensor, pairs: Pairs = "half", blocks: Blocks | None = None
) -> Tensor:
    """The sum of parts, all of them with tables or all without, laid in memory as `like` is."""
    require(like)
    if len(parts) > MAX_PARTS:
        wide = torch.empty_like(like, dtype=torch.float32)
        sums = (add_up(some, wide, pairs) for some in (parts[:MAX_PARTS], parts[MAX_PARTS:]))
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
    where = [_numbers(part, x, by[0]) for part, x, by in zip(parts, xs, tables, strict=True)]
    given = tuple((x, *by, *own) for x, by, own in zip(xs, tables, where, strict=True))
    tensors = (out, *xs, *(t for by in tables for t in by))
    key = (*(x.dtype for x in tensors), numbers, *where, *constants.values())
    launch(_kernel, (runs * b * groups, 1, 1), (given, out, *numbers), tensors, key,
           lambda: constants)  # fmt: skip
    return out


def _numbers(part: GradientPart, x: Tensor, table: Tensor) -> tuple[int, ...]:
    """Where a part's windows lie, and strides."""
    starts, size = part.starts, x.shape[3]
    step = starts[1] - starts[0] if len(starts) > 1 else size
    by_batch = table.stride(0) if table.shape[0] > 1 else 0
    where = (starts[0], step, len(starts), size, int(part.flipped))
    return *where, *x.stride()[:4], by_batch, table.stride(2)
