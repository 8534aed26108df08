"""The two kernels of decoding: a share of the keys for each program, and the merge of the shares.

`decode` launches them and says what they do; `sight.looked_at` is the twin.
"""

from __future__ import annotations

import math
from typing import no_type_check

import triton
import triton.language as tl

from longitude.ops.decode_plan import FIELDS

LOG2E = tl.constexpr(math.log2(math.e))
COUNTS = tl.constexpr(FIELDS)
# numbers that change as a cache grows: a kernel made for one of them would be made again, for
# seconds, in the middle of a text
CHANGING = (
    "plan_row", "hidden_b", "capacity", "kv_heads", "group", "tiles", "queries", "pieces", "splits",
    "total_rows", "per_head", "heads",
)  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def decode_kernel(q, k, v, out, lse, ints, floats, cos, sin, start_cos, start_sin, hidden, capacity,
            q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, hidden_b, plan_row, scale,
            kv_heads, group, tiles, queries, pieces, splits, total_rows,
            HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
            DV: tl.constexpr, DV_PAD: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
            ADJACENT: tl.constexpr, TURNS: tl.constexpr, ALONE: tl.constexpr,
            HIDES: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """One share of one key head's blocks: the output and the log-sum-exp (base 2) of it."""
    tile, split = tl.program_id(0), tl.program_id(1)
    pair, tile = tile // tiles, tile % tiles
    batch, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    row = tile * R + tl.arange(0, R)
    live, n = row < group * queries, row % queries
    head = kv_head * group + row // queries
    q += batch * q_b + head * q_h + n * q_n
    qa, qb, qr = _split_query(q, live, HALF, HALF_PAD, REST, REST_PAD, ADJACENT)
    k += batch * k_b + kv_head * k_h
    v += batch * v_b + kv_head * v_h
    hidden += batch * hidden_b
    ints += batch * plan_row
    floats += batch * plan_row
    each = COUNTS + 2 * queries
    last = ints + (pieces - 1) * each
    total = tl.load(last) + tl.load(last + 1)
    share = tl.cdiv(total, splits)
    begin = split * share
    end = tl.minimum(begin + share, total)
    top = tl.full((R,), float("-inf"), tl.float32)
    norm = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, DV_PAD), tl.float32)
    for _ in range(pieces):
        before, count = tl.load(ints), tl.load(ints + 1)
        first, stop = tl.maximum(begin - before, 0), tl.minimum(end - before, count)
        if first < stop:
            top, norm, acc = _piece(
                qa, qb, qr, k, v, k_n, v_n, ints, floats, cos, sin, start_cos, start_sin, hidden,
                capacity, n, live, scale, first, stop, top, norm, acc, HALF, HALF_PAD, REST,
                REST_PAD, DV, DV_PAD, R, N, ADJACENT, TURNS, ALONE, HIDES, WIDE,
            )  # fmt: skip
        ints += each
        floats += queries * 2 * HALF
    at = split * total_rows + (batch * kv_heads * group + head) * queries + n
    some = tl.where(norm > 0, norm, 1.0)
    tl.store(lse + at, top + tl.log2(some), mask=live)
    column = tl.arange(0, DV_PAD)
    tl.store(
        out + at[:, None] * DV + column[None, :],
        (acc / some[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & (column < DV)[None, :],
    )


@triton.jit
@no_type_check
def _split_query(q, live, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr,
                 REST_PAD: tl.constexpr, ADJACENT: tl.constexpr):  # fmt: skip
    """The first and second of each pair, and the dimensions that do not turn."""
    pair, rest = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    here = live[:, None] & (pair < HALF)
    one, two = pair, pair + HALF
    if ADJACENT:
        one, two = 2 * pair, 2 * pair + 1
    qa = tl.load(q[:, None] + one, mask=here, other=0.0).to(tl.float32)
    qb = tl.load(q[:, None] + two, mask=here, other=0.0).to(tl.float32)
    past = live[:, None] & (rest < REST)
    return qa, qb, tl.load(q[:, None] + 2 * HALF + rest, mask=past, other=0.0)


@triton.jit
@no_type_check
def _piece(qa, qb, qr, k, v, k_n, v_n, ints, floats, cos, sin, start_cos, start_sin, hidden,
           capacity, n, live, scale, first, stop, top, norm, acc,
           HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
           DV: tl.constexpr, DV_PAD: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
           ADJACENT: tl.constexpr, TURNS: tl.constexpr, ALONE: tl.constexpr,
           HIDES: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Blocks first … stop-1 of a piece; the table of their keys stays in registers."""
    t, pair = tl.arange(0, N), tl.arange(0, HALF_PAD)
    frame, start, offset, span, chunk, per_chunk, lead, wrap, least, most = _fields(ints)
    low = tl.load(ints + COUNTS + 2 * n, mask=live, other=0)
    high = tl.load(ints + COUNTS + 2 * n + 1, mask=live, other=0)
    c, s = 0.0, 0.0
    if HALF:
        qa, qb = _place(qa, qb, floats + n * 2 * HALF, live, HALF, HALF_PAD)
    if TURNS:
        known = tl.broadcast_to((pair < HALF)[None, :], (N, HALF_PAD))
        at = (frame * N + t[:, None]) * HALF + pair[None, :]
        c, s = tl.load(cos + at, mask=known, other=0.0), tl.load(sin + at, mask=known, other=0.0)
    column, rest = tl.arange(0, DV_PAD), tl.arange(0, REST_PAD)
    for block in range(first + start, stop + start):
        within = block % per_chunk * span
        p = block // per_chunk * chunk + within
        until = tl.minimum(tl.minimum(span, chunk - within), most - p)
        inside = (t >= least - p) & (t < until)
        keys = k + (p + offset).to(tl.int64) * k_n + t * k_n
        product = tl.zeros((R, N), tl.float32)
        if HALF:
            ua, ub = qa, qb
            if TURNS:
                mine = (frame * capacity + (block - start + lead) % wrap) * HALF
                ua, ub = _back(qa, qb, start_cos + mine, start_sin + mine, HALF, HALF_PAD)
            a, b = _keys(keys, inside, c, s, HALF, HALF_PAD, ADJACENT, TURNS, N)
            product = _dot(ua.to(a.dtype), tl.trans(a), product, WIDE)
            product = _dot(ub.to(b.dtype), tl.trans(b), product, WIDE)
        if REST:
            past = inside[:, None] & (rest < REST)[None, :]
            kr = tl.load(keys[:, None] + 2 * HALF + rest[None, :], mask=past, other=0.0)
            product = _dot(qr, tl.trans(kr), product, WIDE)
        shown = _shown(inside, p + t, low, high, hidden + p + offset + t, ALONE, HIDES)
        product = tl.where(shown, product * scale, float("-inf"))
        values = v + (p + offset).to(tl.int64) * v_n + t[:, None] * v_n + column[None, :]
        some = inside[:, None] & (column < DV)[None, :]
        top, norm, acc = _join(product, tl.load(values, mask=some, other=0.0), top, norm, acc, WIDE)
    return top, norm, acc


@triton.jit
@no_type_check
def _fields(ints):
    """What tells where a piece's blocks lie, in the order of `sight._numbers`."""
    frame, start, offset = tl.load(ints + 2), tl.load(ints + 3), tl.load(ints + 4)
    span, chunk, per_chunk = tl.load(ints + 5), tl.load(ints + 6), tl.load(ints + 7)
    lead, wrap = tl.load(ints + 8), tl.load(ints + 9)
    least, most = tl.load(ints + 10), tl.load(ints + 11)
    return frame, start, offset, span, chunk, per_chunk, lead, wrap, least, most


@triton.jit
@no_type_check
def _shown(inside, p, low, high, hidden, ALONE: tl.constexpr, HIDES: tl.constexpr):
    """What each query sees of a block."""
    if HIDES:
        inside &= tl.load(hidden, mask=inside, other=1) == 0
    shown = inside[None, :]
    if not ALONE:
        shown &= (p[None, :] >= low[:, None]) & (p[None, :] < high[:, None])
    return shown


@triton.jit
@no_type_check
def _place(qa, qb, floats, live, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Queries turned to where they stand in a piece's region."""
    pair = tl.arange(0, HALF_PAD)[None, :]
    here = live[:, None] & (pair < HALF)
    c = tl.load(floats[:, None] + pair, mask=here, other=0.0)
    s = tl.load(floats[:, None] + HALF + pair, mask=here, other=0.0)
    return qa * c - qb * s, qb * c + qa * s


@triton.jit
@no_type_check
def _back(qa, qb, cos, sin, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Queries turned back by a block's own angle: its keys then turn as those of the first do."""
    pair = tl.arange(0, HALF_PAD)
    c = tl.load(cos + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + pair, mask=pair < HALF, other=0.0)[None, :]
    return qa * c + qb * s, qb * c - qa * s


@triton.jit
@no_type_check
def _keys(keys, inside, c, s, HALF: tl.constexpr, HALF_PAD: tl.constexpr, ADJACENT: tl.constexpr,
          TURNS: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The first and second of each pair of a block's keys, turned."""
    if ADJACENT:
        column = tl.arange(0, 2 * HALF_PAD)
        here = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.load(keys[:, None] + column[None, :], mask=here, other=0.0)
        a, b = tl.split(tl.reshape(both, (N, HALF_PAD, 2)))
    else:
        column = tl.arange(0, HALF_PAD)
        here = inside[:, None] & (column < HALF)[None, :]
        a = tl.load(keys[:, None] + column[None, :], mask=here, other=0.0)
        b = tl.load(keys[:, None] + HALF + column[None, :], mask=here, other=0.0)
    if TURNS:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = (wide_a * c - wide_b * s).to(a.dtype)
        b = (wide_b * c + wide_a * s).to(b.dtype)
    return a, b


@triton.jit
@no_type_check
def _dot(a, b, acc, WIDE: tl.constexpr):
    """A product added to `acc`; float32 stays float32."""
    if WIDE:  # Triton's interpreter would take the bits of bfloat16 for whole numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
@no_type_check
def _join(product, value, top, norm, acc, WIDE: tl.constexpr):
    """One more block into a running softmax of base 2; rows that have seen nothing stay empty."""
    more = tl.maximum(top, tl.max(product, 1))
    base = tl.where(more == float("-inf"), 0.0, more)
    weight, fade = tl.exp2(product - base[:, None]), tl.exp2(top - base)
    norm = norm * fade + tl.sum(weight, 1)
    return more, norm, _dot(weight.to(value.dtype), value, acc * fade[:, None], WIDE)


@triton.jit(do_not_specialize=CHANGING)
@no_type_check
def merge_kernel(parts, lses, sinks, out, splits, total_rows, per_head, heads, SINKS: tl.constexpr,
           DV: tl.constexpr, DV_PAD: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """The parts of one query's softmax, and a sink's logit as one more whose value is nothing."""
    row = tl.program_id(0).to(tl.int64)
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
        here = real[:, None] & (column < DV)[None, :]
        some = tl.load(parts + at[:, None] * DV + column[None, :], mask=here, other=0.0)
        acc = acc * fade + tl.sum(some * weight[:, None], 0)
        norm, top = norm * fade + tl.sum(weight, 0), more
    acc = acc / tl.where(norm > 0, norm, 1.0)
    tl.store(out + row * DV + column, acc.to(out.dtype.element_ty), mask=column < DV)
