"""Decoding on Hopper: one warp per share of the keys, so that no thread waits for another warp.

Keys are the rows of a product, and the few queries of a group of heads its columns. A key is loaded
into the registers that feed the tensor cores and rotated there, and shuffles bring the weights into
the layout in which they multiply the values. So nothing goes back through shared memory, and the
loop has no barrier, where `decode` has 17 per block. On an H200 rotating keys as they are read then
adds little to the time of reading them.

It is written in Gluon, Triton's language of explicit layouts, which the interpreter can't run. Its
reference is the kernel of `decode`, which plans and launches it, and runs all other calls.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from longitude.ops.kernels.decode import COUNTS, VARYING, share_of

share_of = gluon.jit(share_of.fn)  # the same code, in this language
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
@no_type_check
def _rows(x, x_n, low, high, memory, WIDTH: gl.constexpr, N: gl.constexpr, WHOLE: gl.constexpr):
    """Copy WIDTH columns of a block's keys or values, with zeros for keys outside its segment."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    t, column = gl.arange(0, N, gl.SliceLayout(1, L)), gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    at = x + (t * x_n)[:, None] + column[None, :]
    if WHOLE:
        copy(memory, at)
    else:
        inside = ((t >= low) & (t < high))[:, None]
        copy(memory, at, mask=inside)


@gluon.jit
@no_type_check
def _next(place, segment):
    """The next block: where its chunk begins, its index in the chunk, and its row of angles."""
    chunk, block, angle = place
    size, blocks, rows = segment[1], segment[2], segment[5]
    chunk_ends = block + 1 == blocks
    chunk, block = gl.where(chunk_ends, chunk + size, chunk), gl.where(chunk_ends, 0, block + 1)
    return chunk, block, gl.where(angle + 1 == rows, 0, angle + 1)


@gluon.jit
@no_type_check
def _bounds(place, segment):
    """Where a block begins, the first of its keys that counts, and the one after the last."""
    span, size, _, least, most, _ = segment
    p = place[0] + place[1] * span
    return p, least - p, gl.minimum(gl.minimum(p + span, place[0] + size), most) - p


@gluon.jit
@no_type_check
def _page(table, place, segment, PAGE: gl.constexpr):
    """The page that holds a block."""
    p, page = place[0] + place[1] * segment[0], 0
    if PAGE:
        page = gl.load(table + p // PAGE, mask=p < segment[4], other=0)
    return page


@gluon.jit
@no_type_check
def _copy(k, v, angles, place, page, segment, here, stage, memory, HALF: gl.constexpr,
          DV: gl.constexpr, N: gl.constexpr, PAGE: gl.constexpr, K_PAGE: gl.constexpr,
          V_PAGE: gl.constexpr):  # fmt: skip
    """Start copying a block if it exists: both halves of its keys, its values and its angles."""
    if here:
        p, low, high = _bounds(place, segment)
        row = place[2] * HALF + gl.arange(0, HALF, gl.BlockedLayout([2], [32], [1], [0]))
        for n in gl.static_range(2):
            copy(memory[3 + n].index(stage), angles[n] + row)
        k_at, v_at = k[0], v[0]
        if PAGE:
            k_at, v_at = k_at + page.to(gl.int64) * K_PAGE, v_at + page.to(gl.int64) * V_PAGE
            p = p % PAGE
        k_at, v_at = k_at + p.to(gl.int64) * k[1], v_at + p.to(gl.int64) * v[1]
        a, b, values = memory[0].index(stage), memory[1].index(stage), memory[2].index(stage)
        if (low <= 0) & (high >= N):
            _rows(k_at, k[1], low, high, a, HALF, N, True)
            _rows(k_at + HALF, k[1], low, high, b, HALF, N, True)
            _rows(v_at, v[1], low, high, values, DV, N, True)
        else:
            _rows(k_at, k[1], low, high, a, HALF, N, False)
            _rows(k_at + HALF, k[1], low, high, b, HALF, N, False)
            _rows(v_at, v[1], low, high, values, DV, N, False)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _attend(queries, tables, scale, bounds, memory, stage, state, ROTATES: gl.constexpr,
            N: gl.constexpr, R: gl.constexpr, M: gl.constexpr):  # fmt: skip
    """Add a block to a running softmax of base 2."""
    qa, qb = queries
    cos, sin = tables
    low, high = bounds
    top, norm, acc = state
    LEFT: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    T: gl.constexpr = memory[0].dtype
    a, b = memory[0].index(stage).load(LEFT), memory[1].index(stage).load(LEFT)
    if ROTATES:
        # the query is rotated back by the block's angle, so all blocks share one key table
        c = memory[3].index(stage).load(gl.SliceLayout(1, RIGHT))[:, None]
        s = memory[4].index(stage).load(gl.SliceLayout(1, RIGHT))[:, None]
        qa, qb = qa * c + qb * s, qb * c - qa * s
        wide_a, wide_b = a.to(gl.float32), b.to(gl.float32)
        a, b = (wide_a * cos - wide_b * sin).to(T), (wide_b * cos + wide_a * sin).to(T)
    product = mma_v2(a, qa.to(T), gl.full([N, R], 0.0, gl.float32, M))
    product = mma_v2(b, qb.to(T), product) * scale
    if (low > 0) | (high < N):
        t = gl.arange(0, N, gl.SliceLayout(1, M))[:, None]
        product = gl.where((t >= low) & (t < high), product, float("-inf"))
    new_top = gl.maximum(top, gl.max(product, 0))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weight, rescale = gl.exp2(product - base[None, :]), gl.exp2(top - base)
    norm = norm * rescale[None, :] + weight  # kept per key, within a thread: summed at the end
    value = memory[2].index(stage).permute((1, 0)).load(LEFT)
    acc = mma_v2(value, gl.convert_layout(weight.to(T), RIGHT), acc * rescale[None, :])
    return new_top, norm, acc


@gluon.jit
@no_type_check
def _segment(q, k, v, ints, floats, tables, table, capacity, group, scale, first, stop, memory,
             state, HALF: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
             ROTATES: gl.constexpr, PAGE: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr,
             M: gl.constexpr):  # fmt: skip
    """Blocks first … stop-1 of a segment. The table that rotates their keys stays in registers."""
    frame, start, offset = gl.load(ints + 2), gl.load(ints + 3), gl.load(ints + 4)
    span, chunk, per_chunk = gl.load(ints + 5), gl.load(ints + 6), gl.load(ints + 7)
    lead, wrap = gl.load(ints + 8), gl.load(ints + 9)
    segment = (span, chunk, per_chunk, gl.load(ints + 10), gl.load(ints + 11), wrap)
    cos, sin, start_cos, start_sin = tables
    angles = (start_cos + frame * capacity * HALF, start_sin + frame * capacity * HALF)
    k = (k[0] + offset.to(gl.int64) * k[1], k[1])
    v = (v[0] + offset.to(gl.int64) * v[1], v[1])
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    dim = gl.arange(0, HALF, gl.SliceLayout(1, RIGHT))[:, None]
    row = gl.arange(0, R, gl.SliceLayout(0, RIGHT))[None, :]
    q = q[0] + row * q[1] + dim
    qa = gl.load(q, mask=row < group, other=0.0).to(gl.float32)
    qb = gl.load(q + HALF, mask=row < group, other=0.0).to(gl.float32)
    c, s = gl.load(floats + dim), gl.load(floats + HALF + dim)
    queries = (qa * c - qb * s, qb * c + qa * s)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    steps = (frame * N + gl.arange(0, N, gl.SliceLayout(1, LEFT))[:, None]) * HALF
    steps = steps + gl.arange(0, HALF, gl.SliceLayout(0, LEFT))[None, :]
    key_table = (gl.load(cos + steps), gl.load(sin + steps))
    block = first + start
    now = (block // per_chunk * chunk, block % per_chunk, (first + lead) % wrap)
    page = _page(table, now, segment, PAGE)
    _copy(k, v, angles, now, page, segment, True, 0, memory, HALF, DV, N, PAGE, K_PAGE, V_PAGE)
    ahead = _next(now, segment)
    page = _page(table, ahead, segment, PAGE)
    for block in range(first, stop):
        stage = (block - first) & 1
        later = _next(ahead, segment)
        later_page = _page(table, later, segment, PAGE)  # early, to hide its latency
        async_copy.wait_group(0)
        # the next block is copied while this one is multiplied
        _copy(k, v, angles, ahead, page, segment, block + 1 < stop, 1 - stage, memory, HALF, DV, N,
              PAGE, K_PAGE, V_PAGE)  # fmt: skip
        _p, low, high = _bounds(now, segment)
        state = _attend(queries, key_table, scale, (low, high), memory, stage, state, ROTATES,
                        N, R, M)  # fmt: skip
        now, ahead, page = ahead, later, later_page
    return state


@gluon.jit(do_not_specialize=VARYING)
@no_type_check
def decode_hopper_kernel(q, k, v, out, ints, floats, cos, sin, start_cos, start_sin, hidden, table,
            capacity, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, hidden_b, table_b, plan_row,
            scale, kv_heads, group, tiles, queries, segments, splits, least, total_rows,
            HALF: gl.constexpr, DV: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
            ROTATES: gl.constexpr, PAGE: gl.constexpr, K_PAGE: gl.constexpr,
            V_PAGE: gl.constexpr, ONCE: gl.constexpr):  # fmt: skip
    """What `decode_kernel` computes from the same arguments, for one query per head."""
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    T: gl.constexpr = k.dtype.element_ty
    pair, split = gl.program_id(0), gl.program_id(1)
    batch, kv_head = (pair // kv_heads).to(gl.int64), (pair % kv_heads).to(gl.int64)
    q += batch * q_b + kv_head * group * q_h
    k += kv_head * k_h
    v += kv_head * v_h
    if PAGE:
        table += batch * table_b
    else:
        k += batch * k_b
        v += batch * v_b
    ints, floats = ints + batch * plan_row, floats + batch * plan_row
    begin, end = share_of(split, splits, least, ints + (segments - 1) * (COUNTS + 2))
    S: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    ANGLES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = (
        gl.allocate_shared_memory(T, [2, N, HALF], S),
        gl.allocate_shared_memory(T, [2, N, HALF], S),
        gl.allocate_shared_memory(T, [2, N, DV], S),
        gl.allocate_shared_memory(gl.float32, [2, HALF], ANGLES),
        gl.allocate_shared_memory(gl.float32, [2, HALF], ANGLES),
    )
    HEAD: gl.constexpr = gl.SliceLayout(0, M)
    state = (
        gl.full([R], float("-inf"), gl.float32, HEAD),
        gl.full([N, R], 0.0, gl.float32, M),
        gl.full([DV, R], 0.0, gl.float32, M),
    )
    for _ in range(segments):
        before, count = gl.load(ints), gl.load(ints + 1)
        first, stop = gl.maximum(begin - before, 0), gl.minimum(end - before, count)
        if first < stop:
            state = _segment((q, q_h), (k, k_n), (v, v_n), ints, floats,
                             (cos, sin, start_cos, start_sin), table, capacity, group, scale,
                             first, stop, memory, state, HALF, DV, R, N, ROTATES, PAGE, K_PAGE,
                             V_PAGE, M)  # fmt: skip
        ints += COUNTS + 2
        floats += 2 * HALF
    top, norm, acc = state
    norm = gl.sum(norm, 0)
    safe_norm = gl.where(norm > 0, norm, 1.0)
    row, column = gl.arange(0, R, HEAD), gl.arange(0, DV, gl.SliceLayout(1, M))
    live = row < group
    at = split * total_rows + (batch * kv_heads + kv_head) * group + row
    written = live
    if not ONCE:
        written = live & (norm > 0)
        lse = out + total_rows.to(gl.int64) * splits * DV
        gl.store(lse + at, top + gl.log2(safe_norm), mask=live)  # of base 2
    acc = (acc / safe_norm[None, :]).to(out.dtype.element_ty)
    gl.store(out + at[None, :] * DV + column[:, None], acc, mask=written[None, :])
