"""One call of a band's kernels: its tensors checked, its sizes as the kernels take them.

What the kernels of a band do with one tile: where it lies, what it loads, what its bias is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from longitude.core.validate import UserError
from longitude.ops.band import Bias, Part
from longitude.ops.kernels.launch import require, shape

LOG2E = 1 / math.log(2)
LARGEST_HEAD = 256


class Blocks(NamedTuple):
    """What one program takes: rows of queries, columns of keys at a time, by so many warps."""

    rows: int
    columns: int
    warps: int
    stages: int


class Call(NamedTuple):
    """A part whose tensors a kernel can read, and what it takes besides."""

    part: Part

    @classmethod
    def of(cls, part: Part) -> Call:
        _check(part)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in part[:3])
        bias = part.bias and Bias(part.bias.table.float().contiguous(), part.bias.first)
        return cls(Part(q, k, v, bias, part.band.within(q.shape[2], k.shape[2]), *part[5:]))

    @property
    def table(self) -> tuple[Any, ...]:
        if self.part.bias is None:  # a kernel's arguments are always there
            return (self.part.q, 0, 0, 1)
        table, first, _ = self.part.bias
        return (table, table.stride(0), first, table.shape[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        batch, heads, n, _ = self.part.q.shape
        kv, m = self.part.k.shape[1:3]
        return (batch * heads, heads, heads // kv, n, m, *self.part.band)

    @property
    def scales(self) -> tuple[float, float]:
        return (self.part.scale * LOG2E, LOG2E)

    @property
    def key(self) -> tuple[Any, ...]:
        """What follows from the tensors' shapes, and all else that a kernel is compiled for."""
        q, k, v, bias, band, _, reach, chunk = self.part
        table = bias and (bias.table.shape, bias.first)
        return (shape(q), shape(k), shape(v), table, band, chunk, reach is None)

    @property
    def tensors(self) -> list[Tensor]:
        """All that a kernel reads."""
        q, k, v, bias, _, _, reach, _ = self.part
        return [x for x in (q, k, v, bias and bias.table, reach) if x is not None]

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        """What a kernel is compiled for."""
        n, d, dv = *self.part.q.shape[2:], self.part.v.shape[-1]
        return {
            "D": d, "DV": dv, "WIDTH": _width(d), "WIDTH_V": _width(dv), "ROWS": blocks.rows,
            "COLUMNS": blocks.columns, "RUN": self.run(blocks),
            "REACH": self.part.reach is not None, "WINDOW": self.part.band.hi < n,
            "num_warps": blocks.warps, "num_stages": blocks.stages,
        }  # fmt: skip

    def run(self, blocks: Blocks) -> int:
        """Entries of the table that a tile needs; none where there is no bias."""
        return 0 if self.part.bias is None else _width(blocks.rows + blocks.columns - 1)

    @property
    def chunk(self) -> tuple[int, ...]:
        """The chunk's numbers; any others where there is none: a kernel's arguments are."""
        return tuple(self.part.chunk or (1, 0, 1, 0, 0))

    def reach(self, otherwise: Tensor) -> Tensor:
        """The reach of each head, or any tensor where there is none: a kernel's arguments are."""
        return otherwise if self.part.reach is None else self.part.reach


def laid(x: Tensor) -> tuple[Any, ...]:
    """A tensor (b h n …) for a kernel: its pointer and the strides of all but its last."""
    return (x, *x.stride()[:3])


def _width(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def _check(part: Part) -> None:
    q, k, v, bias, _, scale, *_ = part
    require(q)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or {k.dtype, v.dtype} != {
        q.dtype
    }:
        raise UserError(
            f"the banded kernel takes q, k and v of one type, float16, bfloat16 or float32, but "
            f"got {q.dtype}, {k.dtype} and {v.dtype}: convert them."
        )
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD or scale <= 0:
        raise UserError(
            f"the banded kernel takes heads of up to {LARGEST_HEAD} and a scale above zero, but "
            f"got {q.shape[-1]}, {v.shape[-1]} and {scale}: use another backend."
        )
    if bias and (bias.table.shape[0] != q.shape[1] or bias.table.shape[1] == 0):
        raise UserError(
            f"a bias by distance is (heads, distances) = ({q.shape[1]}, 1 or more), but got "
            f"{tuple(bias.table.shape)}: give a row for each head."
        )


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
