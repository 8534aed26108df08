"""The forward of `banded` on Hopper, whose warps are specialised: one warp copies tiles of keys and
values into shared memory, and two groups of four take 64 rows each. A group lets the matrix units
multiply the next keys, and its last weights with their values, while it computes exponentials (Shah
et al. 2024, "FlashAttention-3"), which Triton's own pipeline does not do: on an H200 it takes less
time than cuDNN for causal attention, where `banded` takes 1.5 times as long.

Two bands of one softmax, such as a remap's near and far keys, are one launch: each has queries and
keys of its own, rotated its own way, and a program goes through the blocks of both. Blocks that an
edge of a band crosses come last.

It is written in Gluon, Triton's language of explicit layouts, which no interpreter runs: its
reference is the kernel of `banded`, which also has all other calls. `hopper_launch` launches it.

A bias is what a tile's products are added to: a run of distances, read while the tile before is
multiplied, which a gather spreads over the tile. What a thread's rows and columns add to an index
is split from what its registers do: the second is a constant of each instruction.
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

ROWS, COLUMNS, STAGES = 128, 128, 2  # of two groups; of a tile of keys; tiles in shared memory
RUN = gl.constexpr(256)  # entries of a bias that a group reads for a tile: 191, as a power of two

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
spans, chunk_of, within, bias_by_share, steady = (
    gluon.jit(one.fn)
    for one in (banded.spans, banded.chunk_of, banded.within, banded.bias_by_share, banded.steady)
)


@gluon.constexpr_function
def tile_layout() -> gl.DistributedLinearLayout:
    """A group's tile of scores as (rows, eights of columns, columns): the matrix units' layout,
    where a thread has all eights of its columns."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 16, 8],
    )  # fmt: skip


@gluon.jit
@no_type_check
def _barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers that so many arrivals pass: a tile is full when it was copied, and done with when
    both groups say so."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(made.index(n), count=ARRIVALS)
    return made


@gluon.jit
@no_type_check
def block_of(index, programs, lanes, at_once, n, ROWS: gl.constexpr):
    """The first row and the lane of a unit. So many heads run side by side, and their rows are in
    descending order, then, of the next heads, ascending: units of one time are about as long, and
    the shortest come last. Every second round of programs is in reverse, so that all have about as
    much to do. What comes after the last unit begins before the first row."""
    round, place = index // programs, index % programs
    index = index + (round % 2) * (programs - 1 - 2 * place)
    blocks = (n + ROWS - 1) // ROWS
    turn, place = index // (at_once * blocks), index % (at_once * blocks)
    row, ascends = blocks - 1 - place // at_once, (lanes // at_once - 1 - turn) % 2
    row = row + ascends * (blocks - 1 - 2 * row)
    lane = turn * at_once + place % at_once
    return (lane < lanes) * (row + 1) * ROWS - ROWS, lane


@gluon.jit
@no_type_check
def _runs(at, lane, head, shares, reach, n, bands, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
          SHARES: gl.constexpr, REACH: gl.constexpr, CHUNKED: gl.constexpr):  # fmt: skip
    """The blocks of columns that rows see, as runs (first, count, band): those that no edge of a
    band crosses (see `banded.spans`), and the others; how many there are of each; each band's first
    column, the one past its last, and its distances; whether the rows are this kernel's."""
    mine = at >= 0
    if SHARES:
        mine = mine & steady(shares, head, gl.maximum(at, 0), ROWS, ROWS // 2)
    far = n
    if REACH:
        far = gl.load(reach + lane)
    inner, edges, seen, counts = (), (), (), (0, 0)
    for band in gl.static_range(len(bands)):
        m, lo, hi = bands[band][0] >> 4, bands[band][1] >> 4, bands[band][2] >> 4
        columns = spans(at, ROWS, n, m, lo, hi, far, COLUMNS)
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
        seen = seen + ((first, m, lo, hi, bands[band][3] >> 4),)
        counts = (counts[0] + last - middle, counts[1] + end - last + middle - begin)
    return inner, edges, counts, seen, mine


@gluon.jit
@no_type_check
def _at(step, runs):
    """The block of a step over runs of blocks, and its band."""
    block, band, before = runs[0][0] + step, 0, 0
    for one in gl.static_range(1, len(runs)):
        before += runs[one - 1][1]
        begun = step >= before
        block = gl.where(begun, runs[one][0] + step - before, block)
        band = gl.where(begun, runs[one][2], band)
    return block, band


@gluon.jit
@no_type_check
def _own(band, every):
    """What a band has of its own, of what every band has."""
    own = every[0]
    for one in gl.static_range(1, len(every)):
        chosen = ()
        for which in gl.static_range(len(own)):
            chosen = chosen + (gl.where(band == one, every[one][which], own[which]),)
        own = chosen
    return own


@gluon.jit
@no_type_check
def _copies(sources, memory, shares, reach, sizes, at_once, n, bands, units, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, REACH: gl.constexpr,
            CHUNKED: gl.constexpr):  # fmt: skip
    """Keep copying: the queries of each unit, then its keys and values, block after block."""
    every_q, every_k, v = sources
    tiles, barriers = memory
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_done, k_full, k_done, v_full, v_done, _turns = barriers
    turn, step = 0, 0
    for index in range(gl.program_id(0), units, gl.num_programs(0)):
        at, lane = block_of(index, gl.num_programs(0), sizes[0], at_once, n, ROWS)
        batch, head = lane // sizes[1], lane % sizes[1]
        inner, edges, counts, seen, mine = _runs(at, lane, head, shares, reach, n, bands, ROWS,
                                              COLUMNS, SHARES, REACH, CHUNKED)  # fmt: skip
        blocks = counts[0] + counts[1]
        if mine & (blocks > 0):
            mbarrier.wait(q_done, (turn & 1) ^ 1)
            mbarrier.expect(q_full, len(every_q) * every_q[0].block_type.nbytes)
            for one in gl.static_range(len(every_q)):
                row = at - (bands[one][4] >> 4)
                copy(every_q[one], [batch, head, row, 0], q_full, q_tiles.index(one))
            own = head // sizes[2]
            for number in range(0, blocks):
                block, band = _at(number, inner + edges)
                stage, phase = step % STAGES, (step // STAGES) & 1
                mbarrier.wait(k_done.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), v.block_type.nbytes)
                for one in gl.static_range(len(every_k)):
                    if band == one:
                        copy(every_k[one], [batch, own, block * COLUMNS, 0], k_full.index(stage),
                             k_tiles.index(stage))  # fmt: skip
                mbarrier.wait(v_done.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                column = block * COLUMNS + _own(band, seen)[4]
                copy(v, [batch, own, column, 0], v_full.index(stage), v_tiles.index(stage))
                step += 1
            turn += 1


@gluon.jit
@no_type_check
def _run_of(top, left, table, by_share, COLUMNS: gl.constexpr, BIASED: gl.constexpr,
            SHARES: gl.constexpr):  # fmt: skip
    """The bias of each distance in a tile, or of their shares for rows with this pace."""
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
    """What a tile's products of queries and keys are added to: the bias of its distances, or 0."""
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
def _seen(s, top, left, ends, LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Scores without the pairs that nobody sees."""
    T: gl.constexpr = tile_layout()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(1, T)))[:, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, T)))[None, :]
    eight = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, T))) * 8
    first, end, lo, hi, _ = ends
    away = (top - left) + row - column  # of the first eight columns
    last = gl.expand_dims(gl.minimum(away - lo, end - 1 - left - column), 1)
    before = gl.expand_dims(gl.maximum(away - hi, first - 1 - left - column), 1)
    seen = (eight[None, :, None] <= last) & (eight[None, :, None] > before)
    seen = gl.convert_layout(gl.reshape(seen, [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
@no_type_check
def _over_columns(x, SUM: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum or the largest of each row, halves by halves: one after the other, each would wait
    for the one before."""
    for level in gl.static_range(4):
        a, b = gl.split(x.reshape([x.shape[0], 2, COLUMNS >> (level + 1)]).permute((0, 2, 1)))
        x = a + b if SUM else gl.maximum(a, b)
    x = gl.sum(x, 1) if SUM else gl.max(x, 1)
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
@no_type_check
def _exponentials(s, most, scale, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile's weights under the largest score so far, their sums, by how much earlier weights
    shrink, and the largest score now."""
    new = gl.maximum(most, _over_columns(s, False, COLUMNS, LAYOUT) * scale)
    base = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * scale - base[:, None])
    return p, _over_columns(p, True, COLUMNS, LAYOUT), gl.exp2(most - base), new


@gluon.jit
@no_type_check
def _head(x, batch, head):
    """Where one head of a tensor (pointer, strides) begins."""
    return x[0] + batch.to(gl.int64) * x[1] + head.to(gl.int64) * x[2]


@gluon.jit
@no_type_check
def _finish(state, out, lse, start, batch, head, at, top, n, mine, log2e, D: gl.constexpr,
            ROWS: gl.constexpr, LAYOUT: gl.constexpr, STARTED: gl.constexpr):  # fmt: skip
    """Join a softmax with the one that stood before, and write its output and log-sum-exp."""
    acc, total, most = state
    token = at + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    here = (token < n) & mine
    if STARTED:
        begun, sums = start
        there, row = here & (token >= top), (token - top).to(gl.int64)
        before = gl.load(_head(sums, batch, head) + row * sums[3], mask=there, other=float("-inf"))
        where = _head(begun, batch, head) + row[:, None] * begun[3] + dim
        so_far = gl.load(where, mask=there[:, None], other=0.0).to(gl.float32)
        new = gl.maximum(most, before * log2e)
        base = gl.where(new == float("-inf"), 0.0, new)
        shrink, share = gl.exp2(most - base), gl.exp2(before * log2e - base)
        acc = acc * shrink[:, None] + so_far * share[:, None]
        total, most = total * shrink + share, new
    none = total == 0.0  # a row that sees nothing gets zeros
    total = gl.where(none, 1.0, total)
    row = token.to(gl.int64)
    where = _head(out, batch, head) + row[:, None] * out[3] + dim
    gl.store(where, (acc / total[:, None]).to(out[0].dtype.element_ty), mask=here[:, None])
    sums = gl.where(none, float("-inf"), most + gl.log2(total)) / log2e
    gl.store(_head(lse, batch, head) + row * lse[3], sums, mask=here)


@gluon.jit
@no_type_check
def _softmax(tiles, barriers, turn, step, at, runs, seen, bias, by_share, scale,
             WHICH: gl.constexpr, S: gl.constexpr, OUT: gl.constexpr, D: gl.constexpr,
             ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr,
             SHARES: gl.constexpr):  # fmt: skip
    """One group's rows of a unit in a running softmax: outputs, sums, maxima, and steps so far."""
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
    s = _seen(s, at, block * COLUMNS, _own(band, seen), S, ROWS, COLUMNS)
    most = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    p, total, _, most = _exponentials(s, most, scale, COLUMNS, S)
    weights = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
    block, band = _at(1, inner + edges)
    run = _run_of(at, block * COLUMNS, bias, by_share, COLUMNS, BIASED, SHARES)
    # one loop for all blocks: between two, the compiler would shuffle the weights at each turn
    for number in range(1, counts[0] + counts[1]):
        before, phase = step % STAGES, (step // STAGES) & 1  # of the values' tile
        step += 1
        stage, left, ends = step % STAGES, block * COLUMNS, _own(band, seen)
        queries = q_tiles.index(band).reshape([2 * ROWS, D]).slice(WHICH * ROWS, ROWS)
        tile = _spread(run, S, ROWS, COLUMNS, BIASED)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        mbarrier.wait(v_full.index(before), phase)
        # the products of this group run beside the exponentials of the other
        mbarrier.wait(turns.index(WHICH), ((step - turn - 1) & 1) ^ (1 - WHICH))
        keys = k_tiles.index(stage).reshape([COLUMNS, D]).permute((1, 0))
        scores = warpgroup_mma(queries, keys, tile, use_acc=BIASED, is_async=True)
        values = v_tiles.index(before)
        output = warpgroup_mma(weights, values.reshape([COLUMNS, D]), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - WHICH))
        block, band = _at(number + 1, inner + edges)
        run = _run_of(at, block * COLUMNS, bias, by_share, COLUMNS, BIASED, SHARES)
        s = warpgroup_mma_wait(1, [scores])
        mbarrier.arrive(k_done.index(stage))
        if number >= counts[0]:
            s = _seen(s, at, left, ends, S, ROWS, COLUMNS)
        p, more, shrink, most = _exponentials(s, most, scale, COLUMNS, S)
        total = total * shrink + more
        # a loop, which this wait is, keeps the compiler from the next one before the exponentials
        mbarrier.wait(v_full.index(before), phase)
        acc = warpgroup_mma_wait(0, [output])
        mbarrier.arrive(v_done.index(before))
        acc = acc * gl.convert_layout(shrink, BY_ROW)[:, None]
        weights = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
    mbarrier.arrive(q_done)
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(step % STAGES).reshape([COLUMNS, D]), acc)
    mbarrier.arrive(v_done.index(step % STAGES))
    return acc, gl.convert_layout(total, BY_ROW), gl.convert_layout(most, BY_ROW), step + 1


@gluon.jit
@no_type_check
def _rows(memory, given, units, WHICH: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr,
          COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr, SHARES: gl.constexpr,
          STARTED: gl.constexpr, IN_PLACE: gl.constexpr, REACH: gl.constexpr,
          CHUNKED: gl.constexpr):  # fmt: skip
    """One group's half of the rows of each unit."""
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
        inner, edges, counts, seen, mine = _runs(at, lane, head, shares, reach, n, bands, ROWS,
                                                 COLUMNS, SHARES, REACH, CHUNKED)  # fmt: skip
        at, sees = at + WHICH * HALF, mine & (counts[0] + counts[1] > 0)
        # scores are scaled as part of a subtraction, so a bias is in the unit of products before it
        bias = (table[0] + head.to(gl.int64) * table[1], table[2], table[3], log2e / scale)
        by_share = (0.0, 0.0)
        if SHARES:
            pace = gl.load(shares[0] + gl.maximum(at, 0) + HALF // 2)  # the middle row's
            by_share = (pace, gl.load(shares[1]))
        acc = gl.full([HALF, D], 0.0, gl.float32, layout=OUT)
        total = gl.full([HALF], 0.0, gl.float32, layout=gl.SliceLayout(1, OUT))
        most = gl.full([HALF], float("-inf"), gl.float32, layout=gl.SliceLayout(1, OUT))
        if sees:
            runs = (inner, edges, counts)
            acc, total, most, step = _softmax(
                tiles, barriers, turn, step, at, runs, seen, bias, by_share, scale, WHICH, S, OUT,
                D, HALF, COLUMNS, STAGES, BIASED, SHARES
            )  # fmt: skip
            turn += 1
        mine = sees if IN_PLACE else mine  # what rows see nothing more stands already
        state = (acc, total, most)
        _finish(state, out, lse, start, batch, head, at, top, n, mine, log2e, D, HALF, OUT, STARTED)


# a kernel is compiled anew for numbers that are 1 or multiples of 16: not for those of tokens, of
# which the ones in tuples are 16 times themselves and 5
@gluon.jit(do_not_specialize=["at_once", "n", "top"])
@no_type_check
def kernel(q, k, q2, k2, v, out, lse, start, table, shares, reach, sizes, scales, at_once, n,
            top, bands, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
            STAGES: gl.constexpr, BIASED: gl.constexpr, SHARES: gl.constexpr, STARTED: gl.constexpr,
            IN_PLACE: gl.constexpr, REACH: gl.constexpr, CHUNKED: gl.constexpr):  # fmt: skip
    """Units of rows, one after another: two groups of warps that compute and a warp that copies."""
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
    given = (out, lse, start, table, shares, reach, sizes, scales, at_once, n, top, bands)
    gl.warp_specialize(
        [
            (_rows, (memory, given, units, 0, D, ROWS, COLUMNS, STAGES, BIASED, SHARES, STARTED,
                     IN_PLACE, REACH, CHUNKED)),
            (_rows, (memory, given, units, 1, D, ROWS, COLUMNS, STAGES, BIASED, SHARES, STARTED,
                     IN_PLACE, REACH, CHUNKED)),
            (_copies, (sources, memory, shares, reach, sizes, at_once, n, bands, units, ROWS,
                       COLUMNS, STAGES, SHARES, REACH, CHUNKED)),
        ],
        [4, 1], [240, 24],  # warps, and registers of their threads, of all but the first
    )  # fmt: skip
