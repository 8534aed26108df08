"""What the kernels of a band do with one tile: where it lies, what it loads, what its bias is."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def tile_of(x, batch, head):
    """Where one head of a tensor (pointer, strides) begins."""
    pointer, sb, sh, _ = x
    return pointer + tl.cast(batch, tl.int64) * sb + tl.cast(head, tl.int64) * sh


@triton.jit
@no_type_check
def bias_of(table, head, log2e):
    """One head's row of a table, where it begins, how long it is, and its unit in powers of two."""
    pointer, by_head, first, length = table
    return pointer + tl.cast(head, tl.int64) * by_head, first, length, log2e


@triton.jit
@no_type_check
def load_tile(pointer, token, begin, end, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Rows begin … of one head as (ROWS, WIDTH), zeros past its end and its size."""
    pointer += tl.cast(begin, tl.int64) * token
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = pointer + row[:, None] * token + column[None, :]
    if MASKED:
        here = (begin + row < end)[:, None] & (column < D)[None, :]
        return tl.load(pointers, mask=here, other=0.0)
    if D < WIDTH:
        return tl.load(pointers, mask=(column < D)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
@no_type_check
def store_tile(x, batch, head, begin, end, tile, D: tl.constexpr, ROWS: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Write rows begin … of one head, in the tensor's own type."""
    row, column = begin + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    pointers = tile_of(x, batch, head) + row.to(tl.int64)[:, None] * x[3] + column[None, :]
    here = (row < end)[:, None] & (column < D)[None, :]
    tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=here)


@triton.jit
@no_type_check
def spans(at, rows, n, m, lo, hi, reach, COLUMNS: tl.constexpr):
    """The columns that rows at … at+rows-1 see, cut at multiples of COLUMNS into three spans: an
    edge of the band may cross the tiles of the first and of the last, and none of the second."""
    last = tl.minimum(at + rows, n)
    begin = tl.maximum(at - tl.minimum(hi, reach) + 1, 0) // COLUMNS * COLUMNS
    end = tl.maximum(tl.minimum(m, last - lo), begin)
    top = tl.cdiv(end, COLUMNS) * COLUMNS
    whole = tl.cdiv(tl.maximum(last - hi, 0), COLUMNS) * COLUMNS
    whole = tl.minimum(tl.maximum(whole, begin), top)
    seen = tl.maximum(tl.minimum(m, at - lo + 1), 0) // COLUMNS * COLUMNS
    return begin, whole, tl.minimum(tl.maximum(seen, whole), top), end


@triton.jit
@no_type_check
def chunk_of(chunk, at, n):
    """The first column and the one past the last that rows from `at` on see of their chunks; the
    rows lie in one chunk."""
    size, lo, hi, row, column = chunk
    own = (at + row) // size
    first = tl.maximum((tl.cast(own, tl.int64) - hi + 1) * size - column, 0)
    last = tl.maximum(tl.minimum((tl.cast(own, tl.int64) - lo + 1) * size - column, n), 0)
    return first.to(tl.int32), last.to(tl.int32)


@triton.jit
@no_type_check
def within(begin, whole, seen, end, first, last, COLUMNS: tl.constexpr):
    """The spans of columns, cut to first … last-1."""
    begin = tl.maximum(begin, first // COLUMNS * COLUMNS)
    end = tl.maximum(tl.minimum(end, last), begin)
    top = tl.cdiv(end, COLUMNS) * COLUMNS
    whole = tl.minimum(tl.maximum(whole, tl.cdiv(first, COLUMNS) * COLUMNS), top)
    whole = tl.maximum(whole, begin)
    seen = tl.minimum(tl.minimum(seen, last // COLUMNS * COLUMNS), top)
    return begin, whole, tl.maximum(seen, whole), end


@triton.jit
@no_type_check
def bias_tile(table, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
              FLIP: tl.constexpr):  # fmt: skip
    """The bias of a tile whose least distance is `least`, (ROWS, COLUMNS) or transposed.

    One entry a thread is read, and a gather spreads the run from shared memory over the tile, in
    whatever layout the product of q and k has; loading by pairs would convert it there.
    """
    pointer, first, length, unit = table
    entry = least - first + tl.arange(0, RUN)
    run = tl.load(pointer + tl.minimum(tl.maximum(entry, 0), length - 1)) * unit
    row, column = tl.arange(0, ROWS), COLUMNS - 1 - tl.arange(0, COLUMNS)
    if FLIP:
        index = tl.reshape(column[:, None] + row[None, :], (COLUMNS * ROWS,))
        tile = tl.reshape(tl.gather(run, index, 0), (COLUMNS, ROWS))
    else:
        index = tl.reshape(row[:, None] + column[None, :], (ROWS * COLUMNS,))
        tile = tl.reshape(tl.gather(run, index, 0), (ROWS, COLUMNS))
    return tile
