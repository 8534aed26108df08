"""The forward of `banded` on Hopper, with specialised warps: one warp copies tiles of keys and
values into shared memory, and two groups of four warps compute 64 rows each. While a group computes
exponentials, tensor cores multiply its next keys, and its last weights by their values (Shah
et al. 2024, "FlashAttention-3"), which Triton's own pipeline does not do: on an H200 it takes less
time than cuDNN for causal attention, where `banded` takes 1.5 times as long.

Two bands of one softmax, such as the near and far keys of a remap, run in one launch: each band has
its own queries and keys, rotated differently, and a program processes the blocks of both. Blocks
that an edge of a band crosses come last.

It is written in Gluon, Triton's language of explicit layouts, which the interpreter can't run. Its
reference is the kernel of `banded`, which also runs all other calls. `hopper_launch` launches it.

A bias is the initial value of a tile's accumulator: a run of biases, one per distance, is read
while the tile before is multiplied, and a gather spreads it over the tile. The gather's index is
split into a part per thread and a part per register: the second is a constant of each instruction.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longitude.ops.kernels import banded

ROWS, COLUMNS, STAGES = 128, 128, 2  # rows of both groups; keys of a tile; tiles buffered
RUN = gl.constexpr(256)  # biases that a group reads for a tile: 191, rounded up to a power of two

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
spans, chunk_of, within, bias_by_share, steady = (
    gluon.jit(one.fn)
    for one in (banded.spans, banded.chunk_of, banded.within, banded.bias_by_share, banded.steady)
)


@gluon.constexpr_function
def tile_layout() -> gl.DistributedLinearLayout:
    """The layout of a group's tile of scores as (row, column // 8, column % 8). It is that of the
    tensor cores, where a thread holds the same columns of every eight."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 16, 8],
    )  # fmt: skip


@gluon.jit
@no_type_check
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that complete after ARRIVALS arrivals: a tile is full once it has been copied, and
    done once both groups have released it."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(n), count=ARRIVALS)
    return barriers


@gluon.jit
@no_type_check
def block_of(index, programs, lanes, at_once, n, ROWS: gl.constexpr):
    """The first row and the lane of a unit. `at_once` heads run side by side, with their blocks in
    descending order; those of the next heads ascend. So concurrent units are about equally long,
    and the shortest come last. Every second round of programs is reversed, which balances their
    work. Units past the last one get a negative first row."""
    round, place = index // programs, index % programs
    index = index + (round % 2) * (programs - 1 - 2 * place)
    blocks = (n + ROWS - 1) // ROWS
    head_set, place = index // (at_once * blocks), index % (at_once * blocks)
    row, ascends = blocks - 1 - place // at_once, (lanes // at_once - 1 - head_set) % 2
    row = row + ascends * (blocks - 1 - 2 * row)
    lane = head_set * at_once + place % at_once
    return (lane < lanes) * (row + 1) * ROWS - ROWS, lane


@gluon.jit
@no_type_check
def _runs(at, lane, head, shares, reach, n, bands, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
          SHARES: gl.constexpr, REACH: gl.constexpr, CHUNKED: gl.constexpr):  # fmt: skip
    """The blocks of columns that rows see, as runs (first, count, band): those that no edge of a
    band crosses (see `banded.spans`), and the others; how many blocks each has; per band its first
    column, the one after its last, lo, hi and offset in v; whether these rows are computed here."""
    live = at >= 0
    if SHARES:
        live = live & steady(shares, head, gl.maximum(at, 0), ROWS, ROWS // 2)
    max_distance = n
    if REACH:
        max_distance = gl.load(reach + lane)
    inner, edges, limits, counts = (), (), (), (0, 0)
    for band in gl.static_range(len(bands)):
        m, lo, hi = bands[band][0] >> 4, bands[band][1] >> 4, bands[band][2] >> 4
        columns = spans(at, ROWS, n, m, lo, hi, max_distance, COLUMNS)
        first = 0
        if CHUNKED:
            chunk = ()
            for number in gl.static_range(5, 10):
                chunk = chunk + (bands[band][number] >> 4,)
            first, m = chunk_of(chunk, at, m)
            columns = within(columns, first, m, COLUMNS)
        begin, middle, last = columns[0] // COLUMNS, columns[1] // COLUMNS, columns[2] // COLUMNS
        end = gl.cdiv(columns[3], COLUMNS)
        last = gl.minimum(last, end)
        inner = inner + ((middle, last - middle, band),)
        edges = edges + ((begin, middle - begin, band), (last, end - last, band))
        limits = limits + ((first, m, lo, hi, bands[band][3] >> 4),)
        counts = (counts[0] + last - middle, counts[1] + end - last + middle - begin)
    return inner, edges, counts, limits, live


@gluon.jit
@no_type_check
def _at(step, runs):
    """The block at a step of the runs, and the band that it belongs to."""
    block, band, before = runs[0][0] + step, 0, 0
    for n in gl.static_range(1, len(runs)):
        before += runs[n - 1][1]
        reached = step >= before
        block = gl.where(reached, runs[n][0] + step - before, block)
        band = gl.where(reached, runs[n][2], band)
    return block, band


@gluon.jit
@no_type_check
def _select_band(band, every):
    """Select the tuple of one band from the tuples of all bands."""
    selected = every[0]
    for b in gl.static_range(1, len(every)):
        fields = ()
        for field in gl.static_range(len(selected)):
            fields = fields + (gl.where(band == b, every[b][field], selected[field]),)
        selected = fields
    return selected


@gluon.jit
@no_type_check
def _copies(sources, memory, shares, reach, sizes, at_once, n, bands, units, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, REACH: gl.constexpr,
            CHUNKED: gl.constexpr):  # fmt: skip
    """The copying warp: for each unit its queries, then its keys and values block by block."""
    every_q, every_k, v = sources
    tiles, barriers = memory
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_done, k_full, k_done, v_full, v_done, _turns = barriers
    turn, step = 0, 0
    for index in range(gl.program_id(0), units, gl.num_programs(0)):
        at, lane = block_of(index, gl.num_programs(0), sizes[0], at_once, n, ROWS)
        batch, head = lane // sizes[1], lane % sizes[1]
        inner, edges, counts, limits, live = _runs(at, lane, head, shares, reach, n, bands, ROWS,
                                                   COLUMNS, SHARES, REACH, CHUNKED)  # fmt: skip
        blocks = counts[0] + counts[1]
        if live & (blocks > 0):
            mbarrier.wait(q_done, (turn & 1) ^ 1)
            mbarrier.expect(q_full, len(every_q) * every_q[0].block_type.nbytes)
            for b in gl.static_range(len(every_q)):
                row = at - (bands[b][4] >> 4)
                copy(every_q[b], [batch, head, row, 0], q_full, q_tiles.index(b))
            kv_head = head // sizes[2]
            for number in range(0, blocks):
                block, band = _at(number, inner + edges)
                stage, phase = step % STAGES, (step // STAGES) & 1
                mbarrier.wait(k_done.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), v.block_type.nbytes)
                for b in gl.static_range(len(every_k)):
                    if band == b:
                        copy(every_k[b], [batch, kv_head, block * COLUMNS, 0], k_full.index(stage),
                             k_tiles.index(stage))  # fmt: skip
                mbarrier.wait(v_done.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                column = block * COLUMNS + _select_band(band, limits)[4]
                copy(v, [batch, kv_head, column, 0], v_full.index(stage), v_tiles.index(stage))
                step += 1
            turn += 1


@gluon.jit
@no_type_check
def _run_of(top, left, table, by_share, COLUMNS: gl.constexpr, BIASED: gl.constexpr,
            SHARES: gl.constexpr):  # fmt: skip
    """The bias of each distance in a tile; with SHARES, that of rows with this pace."""
    entry = top - left - COLUMNS + 1 - table[1]
    entry = entry + gl.arange(0, RUN, layout=gl.BlockedLayout([1], [32], [4], [0]))
    run = entry.to(gl.float32)
    if BIASED:
        if SHARES:
            run = bias_by_share(table, by_share[1], entry, by_share[0])
        else:
            run = gl.load(table[0] + gl.minimum(gl.maximum(entry, 0), table[2] - 1)) * table[3]
    return run


@gluon.jit
@no_type_check
def _spread(run, LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
            BIASED: gl.constexpr):  # fmt: skip
    """The initial accumulator of a tile's product of queries and keys: its bias, or 0."""
    tile = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout=LAYOUT)
    if BIASED:
        T: gl.constexpr = tile_layout()
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(1, T)))[:, None]
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, T)))[None, :]
        eight = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, T))) * 8
        index = gl.expand_dims(row - column + 7, 1) + (COLUMNS - 8 - eight)[None, :, None]
        tile = gl.gather(run, gl.reshape(index, [ROWS * COLUMNS]), 0)
        tile = gl.convert_layout(gl.reshape(tile, [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
    return tile


@gluon.jit
@no_type_check
def _masked(s, top, left, ends, LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores, with -inf for pairs outside the band or its columns."""
    T: gl.constexpr = tile_layout()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(1, T)))[:, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, T)))[None, :]
    eight = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, T))) * 8
    first, end, lo, hi, _ = ends
    dist = (top - left) + row - column  # of the first eight columns
    last = gl.expand_dims(gl.minimum(dist - lo, end - 1 - left - column), 1)
    before = gl.expand_dims(gl.maximum(dist - hi, first - 1 - left - column), 1)
    visible = (eight[None, :, None] <= last) & (eight[None, :, None] > before)
    visible = gl.convert_layout(gl.reshape(visible, [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
    return gl.where(visible, s, float("-inf"))


@gluon.jit
@no_type_check
def _over_columns(x, SUM: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum or the maximum of each row, as a tree over halves: in a sequential reduction every
    operation would wait for the one before."""
    for level in gl.static_range(4):
        a, b = gl.split(x.reshape([x.shape[0], 2, COLUMNS >> (level + 1)]).permute((0, 2, 1)))
        x = a + b if SUM else gl.maximum(a, b)
    x = gl.sum(x, 1) if SUM else gl.max(x, 1)
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
@no_type_check
def _exponentials(s, most, scale, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile's weights relative to the new row maximum, their sums, the factor that rescales
    earlier weights, and that maximum."""
    new_max = gl.maximum(most, _over_columns(s, False, COLUMNS, LAYOUT) * scale)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale - base[:, None])
    return p, _over_columns(p, True, COLUMNS, LAYOUT), gl.exp2(most - base), new_max


@gluon.jit
@no_type_check
def _head(x, batch, head):
    """The address where one head of a tensor (pointer, strides) begins."""
    return x[0] + batch.to(gl.int64) * x[1] + head.to(gl.int64) * x[2]


@gluon.jit
@no_type_check
def _finish(state, out, lse, start, batch, head, at, top, n, mine, log2e, D: gl.constexpr,
            ROWS: gl.constexpr, LAYOUT: gl.constexpr, STARTED: gl.constexpr):  # fmt: skip
    """Merge with the softmax of `start` if STARTED, and write the output and log-sum-exp."""
    acc, row_sum, row_max = state
    token = at + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    valid = (token < n) & mine
    if STARTED:
        old_out, sums = start
        used, row = valid & (token >= top), (token - top).to(gl.int64)
        old_lse = gl.load(_head(sums, batch, head) + row * sums[3], mask=used, other=float("-inf"))
        pointers = _head(old_out, batch, head) + row[:, None] * old_out[3] + dim
        old_tile = gl.load(pointers, mask=used[:, None], other=0.0).to(gl.float32)
        new_max = gl.maximum(row_max, old_lse * log2e)
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
        rescale, old_weight = gl.exp2(row_max - base), gl.exp2(old_lse * log2e - base)
        acc = acc * rescale[:, None] + old_tile * old_weight[:, None]
        row_sum, row_max = row_sum * rescale + old_weight, new_max
    empty = row_sum == 0.0  # rows that see no key get zeros
    row_sum = gl.where(empty, 1.0, row_sum)
    row = token.to(gl.int64)
    pointers = _head(out, batch, head) + row[:, None] * out[3] + dim
    gl.store(pointers, (acc / row_sum[:, None]).to(out[0].dtype.element_ty), mask=valid[:, None])
    sums = gl.where(empty, float("-inf"), row_max + gl.log2(row_sum)) / log2e
    gl.store(_head(lse, batch, head) + row * lse[3], sums, mask=valid)


@gluon.jit
@no_type_check
def _softmax(tiles, barriers, turn, step, at, runs, seen, bias, by_share, scale,
             WHICH: gl.constexpr, S: gl.constexpr, OUT: gl.constexpr, D: gl.constexpr,
             ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr,
             SHARES: gl.constexpr):  # fmt: skip
    """Running softmax of one group's rows of a unit: outputs, sums, maxima, and steps so far."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_done, k_full, k_done, v_full, v_done, turns = barriers
    inner, edges, counts = runs
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    acc = gl.full([ROWS, D], 0.0, gl.float32, layout=OUT)
    block, band = _at(0, inner + edges)
    run = _run_of(at, block * COLUMNS, bias, by_share, COLUMNS, BIASED, SHARES)
    mbarrier.wait(q_full, turn & 1)
    queries = q_tiles.index(band).reshape([2 * ROWS, D]).slice(WHICH * ROWS, ROWS)
    mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
    keys = k_tiles.index(step % STAGES).reshape([COLUMNS, D]).permute((1, 0))
    s = warpgroup_mma(queries, keys, _spread(run, S, ROWS, COLUMNS, BIASED), use_acc=BIASED)
    mbarrier.arrive(k_done.index(step % STAGES))
    s = _masked(s, at, block * COLUMNS, _select_band(band, seen), S, ROWS, COLUMNS)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    p, row_sum, _, row_max = _exponentials(s, row_max, scale, COLUMNS, S)
    weights = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
    block, band = _at(1, inner + edges)
    run = _run_of(at, block * COLUMNS, bias, by_share, COLUMNS, BIASED, SHARES)
    # one loop for all blocks: with two, the compiler would shuffle the weights in every iteration
    for number in range(1, counts[0] + counts[1]):
        previous, phase = step % STAGES, (step // STAGES) & 1  # of the previous tile
        step += 1
        stage, left, ends = step % STAGES, block * COLUMNS, _select_band(band, seen)
        queries = q_tiles.index(band).reshape([2 * ROWS, D]).slice(WHICH * ROWS, ROWS)
        tile = _spread(run, S, ROWS, COLUMNS, BIASED)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        mbarrier.wait(v_full.index(previous), phase)
        # this group's products overlap with the other group's exponentials
        mbarrier.wait(turns.index(WHICH), ((step - turn - 1) & 1) ^ (1 - WHICH))
        keys = k_tiles.index(stage).reshape([COLUMNS, D]).permute((1, 0))
        scores = warpgroup_mma(queries, keys, tile, use_acc=BIASED, is_async=True)
        values = v_tiles.index(previous)
        output = warpgroup_mma(weights, values.reshape([COLUMNS, D]), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH))
        block, band = _at(number + 1, inner + edges)
        run = _run_of(at, block * COLUMNS, bias, by_share, COLUMNS, BIASED, SHARES)
        s = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(k_done.index(stage))
        if number >= counts[0]:
            s = _masked(s, at, left, ends, S, ROWS, COLUMNS)
        p, tile_sum, rescale, row_max = _exponentials(s, row_max, scale, COLUMNS, S)
        row_sum = row_sum * rescale + tile_sum
        # this wait is a loop: the compiler can't move the next wait above the exponentials
        mbarrier.wait(v_full.index(previous), phase)
        acc = warpgroup_mma_wait(0, [output])
        mbarrier.arrive(v_done.index(previous))
        acc = acc * gl.convert_layout(rescale, BY_ROW)[:, None]
        weights = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
    mbarrier.arrive(q_done)
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(step % STAGES).reshape([COLUMNS, D]), acc)
    mbarrier.arrive(v_done.index(step % STAGES))
    return acc, gl.convert_layout(row_sum, BY_ROW), gl.convert_layout(row_max, BY_ROW), step + 1


@gluon.jit
@no_type_check
def _rows(memory, given, units, WHICH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
          COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr, SHARES: gl.constexpr,
          STARTED: gl.constexpr, IN_PLACE: gl.constexpr, REACH: gl.constexpr,
          CHUNKED: gl.constexpr):  # fmt: skip
    """One group of warps: its half of the rows of each unit."""
    tiles, barriers = memory
    out, lse, start, table, shares, reach, sizes, scales, at_once, n, top, bands = given
    scale, log2e = scales
    HALF: gl.constexpr = ROWS // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    turn, step = 0, 0
    for index in range(gl.program_id(0), units, gl.num_programs(0)):
        at, lane = block_of(index, gl.num_programs(0), sizes[0], at_once, n, ROWS)
        batch, head = lane // sizes[1], lane % sizes[1]
        inner, edges, counts, limits, live = _runs(at, lane, head, shares, reach, n, bands, ROWS,
                                                   COLUMNS, SHARES, REACH, CHUNKED)  # fmt: skip
        at, has_keys = at + WHICH * HALF, live & (counts[0] + counts[1] > 0)
        # scores are scaled later, in a subtraction, so the bias has the unit of unscaled products
        bias = (table[0] + head.to(gl.int64) * table[1], table[2], table[3], log2e / scale)
        by_share = (0.0, 0.0)
        if SHARES:
            pace = gl.load(shares[0] + gl.maximum(at, 0) + HALF // 2)  # of the middle row
            by_share = (pace, gl.load(shares[1]))
        acc = gl.full([HALF, D], 0.0, gl.float32, layout=OUT)
        row_sum = gl.full([HALF], 0.0, gl.float32, layout=gl.SliceLayout(1, OUT))
        row_max = gl.full([HALF], float("-inf"), gl.float32, layout=gl.SliceLayout(1, OUT))
        if has_keys:
            runs = (inner, edges, counts)
            acc, row_sum, row_max, step = _softmax(
                tiles, barriers, turn, step, at, runs, limits, bias, by_share, scale, WHICH, S, OUT,
                D, HALF, COLUMNS, STAGES, BIASED, SHARES
            )  # fmt: skip
            turn += 1
        live = has_keys if IN_PLACE else live  # in place, rows without new keys are done
        state = (acc, row_sum, row_max)
        _finish(state, out, lse, start, batch, head, at, top, n, live, log2e, D, HALF, OUT, STARTED)


# Triton specializes kernels on integers that are 1 or divisible by 16, but not on these token
# counts. Those in tuples are passed as 16 x + 5, which is neither
@gluon.jit(do_not_specialize=["at_once", "n", "top"])
@no_type_check
def kernel(q, k, q2, k2, v, out, lse, start, table, shares, reach, sizes, scales, at_once, n,
            top, bands, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
            STAGES: gl.constexpr, BIASED: gl.constexpr, SHARES: gl.constexpr, STARTED: gl.constexpr,
            IN_PLACE: gl.constexpr, REACH: gl.constexpr, CHUNKED: gl.constexpr):  # fmt: skip
    """Units of rows, one after another: two groups of warps compute, and one warp copies."""
    BANDS: gl.constexpr = len(bands)
    q_tiles = gl.allocate_shared_memory(q.dtype, [BANDS, 1, 1, ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, COLUMNS, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, COLUMNS, D], v.layout)
    barriers = (
        _barriers(1, 1).index(0), _barriers(1, 2).index(0), _barriers(STAGES, 1),
        _barriers(STAGES, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(2, 1),
    )  # fmt: skip
    programs = gl.num_programs(0)
    units = gl.cdiv(sizes[0] * gl.cdiv(n, ROWS), programs) * programs
    memory = ((q_tiles, k_tiles, v_tiles), barriers)
    sources = ((q, q2)[:BANDS], (k, k2)[:BANDS], v)
    args = (out, lse, start, table, shares, reach, sizes, scales, at_once, n, top, bands)
    gl.warp_specialize(
        [
            (_rows, (memory, args, units, 0, D, ROWS, COLUMNS, STAGES, BIASED, SHARES, STARTED,
                     IN_PLACE, REACH, CHUNKED)),
            (_rows, (memory, args, units, 1, D, ROWS, COLUMNS, STAGES, BIASED, SHARES, STARTED,
                     IN_PLACE, REACH, CHUNKED)),
            (_copies, (sources, memory, shares, reach, sizes, at_once, n, bands, units, ROWS,
                       COLUMNS, STAGES, SHARES, REACH, CHUNKED)),
        ],
        [4, 1], [240, 24],  # warps and registers per thread, for all partitions but the first
    )  # fmt: skip
