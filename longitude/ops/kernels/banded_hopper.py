"""The forward of `banded` on Hopper, whose warps are specialised: one warp copies tiles of keys and
values into shared memory, and two groups of four take 64 rows each. A group lets the matrix units
multiply the next keys while it computes the exponentials of the last ones (Shah et al. 2024,
"FlashAttention-3"), which Triton's own pipeline does not do: on an H200 it takes 0.91 to 0.94 of
cuDNN's time for causal attention, where `banded` takes 1.5 times that.

It is written in Gluon, Triton's language of explicit layouts, which no interpreter runs: its
reference is the kernel of `banded`, which also has all other calls.

A bias is read as a run of distances, and a gather spreads it over the tile. What a thread's rows
and columns add to an index is split from what its registers do: the second is a constant of each
instruction.
"""

from __future__ import annotations

from functools import cache
from typing import Any, no_type_check

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longitude.ops.bands import Start
from longitude.ops.kernels import banded
from longitude.ops.kernels.banded import LaunchCall, laid
from longitude.ops.kernels.launch import launch, shape
from longitude.ops.plan import HOPPER_HEADS

ROWS, COLUMNS, STAGES = 128, 128, 2  # of two groups; of a tile of keys; tiles in shared memory
RUN = gl.constexpr(256)  # entries of a bias that a group reads for a tile: 191, as a power of two
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

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
def _unit(index, sizes, n, ROWS: gl.constexpr):
    """A program's rows of one head. The longest rows go first, heads that share keys together;
    every second round of programs is in reverse, so that all have about as much to do."""
    lanes, heads, _group = sizes
    programs = gl.num_programs(0)
    round, place = index // programs, index % programs
    index = gl.where(round % 2 == 0, index, (round + 1) * programs - 1 - place)
    lane = index % lanes
    at = (gl.cdiv(n, ROWS) - 1 - index // lanes) * ROWS
    return at, lane, lane // heads, lane % heads


@gluon.jit
@no_type_check
def _blocks(at, lane, head, shares, reach, ends, chunk, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
            SHARES: gl.constexpr, REACH: gl.constexpr, CHUNKED: gl.constexpr):  # fmt: skip
    """The blocks of columns that rows see, as three spans (see `banded.spans`); the first column
    and the one past the last; whether the rows are this kernel's."""
    n, m, lo, hi = ends
    mine = at >= 0
    if SHARES:
        mine = mine & steady(shares, head, gl.maximum(at, 0), ROWS, ROWS // 2)
    far = n
    if REACH:
        far = gl.load(reach + lane)
    columns = spans(at, ROWS, n, m, lo, hi, far, COLUMNS)
    first = 0
    if CHUNKED:
        first, m = chunk_of(chunk, at, m)
        columns = within(columns, first, m, COLUMNS)
    begin, inner, seen, end = columns
    end = gl.cdiv(end, COLUMNS)
    spread = (begin // COLUMNS, inner // COLUMNS, gl.minimum(seen // COLUMNS, end), end)
    return spread, first, m, mine


@gluon.jit
@no_type_check
def _copies(sources, memory, shares, reach, sizes, ends, chunk, units, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr, STAGES: gl.constexpr, SHARES: gl.constexpr, REACH: gl.constexpr,
            CHUNKED: gl.constexpr):  # fmt: skip
    """Keep copying: the queries of each unit, then its keys and values, block after block."""
    q, k, v = sources
    tiles, barriers = memory
    q_tile, k_tiles, v_tiles = tiles
    q_full, q_done, k_full, k_done, v_full, v_done, _turns = barriers
    turn, step = 0, 0
    for index in range(gl.program_id(0), units, gl.num_programs(0)):
        at, lane, batch, head = _unit(index, sizes, ends[0], ROWS)
        blocks, _, _, mine = _blocks(at, lane, head, shares, reach, ends, chunk, ROWS, COLUMNS,
                                     SHARES, REACH, CHUNKED)  # fmt: skip
        if mine & (blocks[0] < blocks[3]):
            mbarrier.wait(q_done, (turn & 1) ^ 1)
            mbarrier.expect(q_full, q.block_type.nbytes)
            copy(q, [batch, head, at, 0], q_full, q_tile)
            own = head // sizes[2]
            for block in range(blocks[0], blocks[3]):
                stage, phase = step % STAGES, (step // STAGES) & 1
                where = [batch, own, block * COLUMNS, 0]
                mbarrier.wait(k_done.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
                copy(k, where, k_full.index(stage), k_tiles.index(stage))
                mbarrier.wait(v_done.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
                copy(v, where, v_full.index(stage), v_tiles.index(stage))
                step += 1
            turn += 1


@gluon.jit
@no_type_check
def _scores(s, top, left, ends, table, by_share, scale, LAYOUT: gl.constexpr, ROWS: gl.constexpr,
            COLUMNS: gl.constexpr, BIASED: gl.constexpr, SHARES: gl.constexpr,
            MASKED: gl.constexpr):  # fmt: skip
    """Products with the bias of their distances, or of their shares for rows with this pace, and
    without the pairs that nobody sees."""
    T: gl.constexpr = tile_layout()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(1, T)))[:, None]
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, T)))[None, :]
    eight = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, T))) * 8
    if BIASED:
        entry = top - left - COLUMNS + 1 - table[1]
        entry = entry + gl.arange(0, RUN, layout=gl.BlockedLayout([1], [32], [4], [0]))
        if SHARES:
            run = bias_by_share(table, by_share[1], entry, by_share[0])
        else:
            run = gl.load(table[0] + gl.minimum(gl.maximum(entry, 0), table[2] - 1)) * table[3]
        index = gl.expand_dims(row - column + 7, 1) + (COLUMNS - 8 - eight)[None, :, None]
        tile = gl.gather(run, gl.reshape(index, [ROWS * COLUMNS]), 0)
        tile = gl.reshape(tile, [ROWS, COLUMNS])
        s = s * scale + gl.convert_layout(tile, LAYOUT, assert_trivial=True)
    if MASKED:
        first, end, lo, hi = ends
        away = (top - left) + row - column  # of the first eight columns
        last = gl.expand_dims(gl.minimum(away - lo, end - 1 - left - column), 1)
        before = gl.expand_dims(gl.maximum(away - hi, first - 1 - left - column), 1)
        seen = (eight[None, :, None] <= last) & (eight[None, :, None] > before)
        seen = gl.convert_layout(gl.reshape(seen, [ROWS, COLUMNS]), LAYOUT, assert_trivial=True)
        s = gl.where(seen, s, float("-inf"))
    return s


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
def _softmax(tiles, barriers, turn, step, at, blocks, seen, bias, by_share, scale,
             WHICH: gl.constexpr, S: gl.constexpr, OUT: gl.constexpr, D: gl.constexpr,
             ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr,
             SHARES: gl.constexpr, EDGES: gl.constexpr):  # fmt: skip
    """One group's rows of a unit in a running softmax: outputs, sums, maxima, and steps so far."""
    q_tile, k_tiles, v_tiles = tiles
    q_full, q_done, k_full, k_done, v_full, v_done, turns = barriers
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    factor = 1.0 if BIASED else scale  # without a bias, scaling waits to be part of a subtraction
    nothing = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout=S)
    acc = gl.full([ROWS, D], 0.0, gl.float32, layout=OUT)
    mbarrier.wait(q_full, turn & 1)
    queries = q_tile.reshape([2 * ROWS, D]).slice(WHICH * ROWS, ROWS)
    mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
    keys = k_tiles.index(step % STAGES).reshape([COLUMNS, D]).permute((1, 0))
    s = warpgroup_mma(queries, keys, nothing, use_acc=False)
    mbarrier.arrive(k_done.index(step % STAGES))
    s = _scores(s, at, blocks[0] * COLUMNS, seen, bias, by_share, scale, S, ROWS, COLUMNS, BIASED,
                SHARES, True)  # fmt: skip
    most = gl.max(s, 1) * factor
    p = gl.exp2(s * factor - gl.where(most == float("-inf"), 0.0, most)[:, None])
    total = gl.sum(p, 1)
    weights = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
    for span in gl.static_range(3):
        if span > 0 or EDGES:
            begin = gl.maximum(blocks[span], blocks[0] + 1)
            for block in range(begin, gl.maximum(blocks[span + 1], begin)):
                before, phase = step % STAGES, (step // STAGES) & 1  # of the values' tile
                step += 1
                stage = step % STAGES
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                mbarrier.wait(v_full.index(before), phase)
                # the products of this group run beside the exponentials of the other
                mbarrier.wait(turns.index(WHICH), ((step - turn - 1) & 1) ^ (1 - WHICH))
                keys = k_tiles.index(stage).reshape([COLUMNS, D]).permute((1, 0))
                scores = warpgroup_mma(queries, keys, nothing, use_acc=False, is_async=True)
                values = v_tiles.index(before).reshape([COLUMNS, D])
                output = warpgroup_mma(weights, values, acc, is_async=True)
                mbarrier.arrive(turns.index(1 - WHICH))
                s = warpgroup_mma_wait(1, [scores])
                mbarrier.arrive(k_done.index(stage))
                s = _scores(s, at, block * COLUMNS, seen, bias, by_share, scale, S, ROWS, COLUMNS,
                            BIASED, SHARES, span != 1)  # fmt: skip
                new = gl.maximum(most, gl.max(s, 1) * factor)
                base = gl.where(new == float("-inf"), 0.0, new) if span != 1 else new
                p, shrink = gl.exp2(s * factor - base[:, None]), gl.exp2(most - base)
                total, most = total * shrink + gl.sum(p, 1), new
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
          STARTED: gl.constexpr, IN_PLACE: gl.constexpr, WINDOW: gl.constexpr, REACH: gl.constexpr,
          CHUNKED: gl.constexpr):  # fmt: skip
    """One group's half of the rows of each unit."""
    tiles, barriers = memory
    out, lse, start, table, shares, reach, scales, sizes, ends, chunk, top = given
    scale, log2e = scales
    n, _, lo, hi = ends
    HALF: gl.constexpr = ROWS // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    turn, step = 0, 0
    for index in range(gl.program_id(0), units, gl.num_programs(0)):
        at, lane, batch, head = _unit(index, sizes, n, ROWS)
        blocks, first, end, mine = _blocks(at, lane, head, shares, reach, ends, chunk, ROWS,
                                           COLUMNS, SHARES, REACH, CHUNKED)  # fmt: skip
        at, sees = at + WHICH * HALF, mine & (blocks[0] < blocks[3])
        bias = (table[0] + head.to(gl.int64) * table[1], table[2], table[3], log2e)
        by_share = (0.0, 0.0)
        if SHARES:
            pace = gl.load(shares[0] + gl.maximum(at, 0) + HALF // 2)  # the middle row's
            by_share = (pace, gl.load(shares[1]))
        acc = gl.full([HALF, D], 0.0, gl.float32, layout=OUT)
        total = gl.full([HALF], 0.0, gl.float32, layout=gl.SliceLayout(1, OUT))
        most = gl.full([HALF], float("-inf"), gl.float32, layout=gl.SliceLayout(1, OUT))
        if sees:
            acc, total, most, step = _softmax(
                tiles, barriers, turn, step, at, blocks, (first, end, lo, hi), bias, by_share,
                scale, WHICH, S, OUT, D, HALF, COLUMNS, STAGES, BIASED, SHARES, WINDOW or CHUNKED
            )  # fmt: skip
            turn += 1
        mine = sees if IN_PLACE else mine  # what rows see nothing more stands already
        state = (acc, total, most)
        _finish(state, out, lse, start, batch, head, at, top, n, mine, log2e, D, HALF, OUT, STARTED)


# kernels are compiled anew for numbers that are 1 or multiples of 16: not for those of tokens
@gluon.jit(
    do_not_specialize="n m lo hi top chunk_size chunk_lo chunk_hi chunk_row chunk_column".split()
)
@no_type_check
def _kernel(q, k, v, out, lse, start, table, shares, reach, sizes, scales, n, m, lo, hi, top,
            chunk_size, chunk_lo, chunk_hi, chunk_row, chunk_column, D: gl.constexpr,
            ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, BIASED: gl.constexpr,
            SHARES: gl.constexpr, STARTED: gl.constexpr, IN_PLACE: gl.constexpr,
            WINDOW: gl.constexpr, REACH: gl.constexpr, CHUNKED: gl.constexpr):  # fmt: skip
    """Units of rows, one after another: two groups of warps that compute and a warp that copies."""
    q_tile = gl.allocate_shared_memory(q.dtype, [1, 1, ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, COLUMNS, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, COLUMNS, D], v.layout)
    barriers = (
        _barriers(1, 1).index(0), _barriers(1, 2).index(0), _barriers(STAGES, 1),
        _barriers(STAGES, 2), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(2, 1),
    )  # fmt: skip
    programs = gl.num_programs(0)
    units = gl.cdiv(sizes[0] * gl.cdiv(n, ROWS), programs) * programs
    memory = ((q_tile, k_tiles, v_tiles), barriers)
    ends = (n, m, lo, hi)
    chunk = (chunk_size, chunk_lo, chunk_hi, chunk_row, chunk_column)
    given = (out, lse, start, table, shares, reach, scales, sizes, ends, chunk, top)
    gl.warp_specialize(
        [
            (_rows, (memory, given, units, 0, D, ROWS, COLUMNS, STAGES, BIASED, SHARES, STARTED,
                     IN_PLACE, WINDOW, REACH, CHUNKED)),
            (_rows, (memory, given, units, 1, D, ROWS, COLUMNS, STAGES, BIASED, SHARES, STARTED,
                     IN_PLACE, WINDOW, REACH, CHUNKED)),
            (_copies, ((q, k, v), memory, shares, reach, sizes, ends, chunk, units, ROWS, COLUMNS,
                       STAGES, SHARES, REACH, CHUNKED)),
        ],
        [4, 1], [240, 24],  # warps, and registers of their threads, of all but the first
    )  # fmt: skip


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def forward(call: LaunchCall, begun: Start, started: bool, outputs: tuple[Tensor, ...]) -> bool:
    """Write a band's output and log-sum-exp; with shares, those of steady units alone. False where
    it does not run a call: it takes half precision, heads that it is compiled for, tensors whose
    tiles the copying unit takes, and rows enough for all of the GPU."""
    q, k, v, bias, _, _, reach, chunk = call.part
    d, units = q.shape[3], call.sizes[0] * -(-call.sizes[3] // ROWS)
    processors = _processors(q.device)
    if q.dtype not in DTYPES or d not in HOPPER_HEADS or v.shape[3] != d or units < processors:
        return False
    # what was expanded is copied: the unit takes no strides of zero
    q, k, v = (x if all(x.stride()) else x.contiguous() for x in (q, k, v))
    tiles, aligned = (_descriptor(q, ROWS), _descriptor(k, COLUMNS), _descriptor(v, COLUMNS)), 0
    for tile in tiles:
        sb, sh, sn, _ = tile.strides
        aligned |= tile.base.data_ptr() | 2 * (sb | sh | sn)
    if aligned % 16:
        return False
    shares = tuple((bias and bias.shares) or ())
    out, lse, *start = map(laid, outputs)
    given = (
        *tiles, out, lse, tuple(start), call.table, shares, call.reach, call.sizes[:3],
        call.scales, *call.sizes[3:], begun.top, *(chunk or (1, 0, 1, 0, 0)),
    )  # fmt: skip
    key = (call.key, *map(shape, outputs), begun.top, started)

    def constants() -> dict[str, Any]:
        return {
            "D": d, "ROWS": ROWS, "COLUMNS": COLUMNS, "STAGES": STAGES, "BIASED": bias is not None,
            "SHARES": bool(shares), "STARTED": started,
            "IN_PLACE": started and outputs[0] is begun.out,
            "WINDOW": call.part.band.hi < call.sizes[3], "REACH": reach is not None,
            "CHUNKED": chunk is not None, "num_warps": 4,
        }  # fmt: skip

    tensors = (*outputs, call.table[0], call.reach, *shares)
    launch(_kernel, (min(units, processors), 1, 1), given, tensors, key, constants)
    return True


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """A tensor as the copying unit takes it, in tiles of so many rows. What its class would check
    takes longer than the launch."""
    made, d = TensorDescriptor.__new__(TensorDescriptor), x.shape[3]
    made.base, made.shape, made.strides, made.padding = x, [*x.shape], [*x.stride()], "zero"
    made.block_shape, made.layout = [1, 1, rows, d], _layout(rows, d, x.dtype)
    return made


@cache
def _layout(rows: int, d: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    shape = [1, 1, rows, d]
    return gl.NVMMASharedLayout.get_default_for(shape, DTYPES[dtype])  # type: ignore[operator]
