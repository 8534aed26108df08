"""Windows of several tensors copied into batches, in one launch, their rows in reverse where asked.

`attention.stack` holds the twin. Torch's own flip reads and writes number by number; here rows move
whole, at the speed of a copy, and queries, keys and values together.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from longitude.ops.gather_windows import Windows
from longitude.ops.kernels.launch import on_device, require


class Blocks(NamedTuple):
    """What one program takes: some rows of one window, by so many warps."""

    rows: int
    warps: int


@triton.jit
@no_type_check
def _stack_kernel(sources, batch, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                  FLIPPED: tl.constexpr):  # fmt: skip
    """The programs of each source follow those of the one before."""
    program = tl.program_id(0)
    for n in tl.static_range(len(sources)):
        x, out, heads, size, blocks, begin, end, first, step, xb, xh, xn = sources[n]
        if (program >= begin) & (program < end):
            lane = ((program - begin) // blocks).to(tl.int64)  # of (t b h), in memory's order
            head, one, tile = lane % heads, (lane // heads) % batch, lane // heads // batch
            row = ((program - begin) % blocks) * ROWS + tl.arange(0, ROWS)
            column = tl.arange(0, WIDTH)[None, :]
            here = (row < size)[:, None] & (column < D)
            from_row = size - 1 - row if FLIPPED else row
            source = x + one * xb + head * xh + (first + tile * step + from_row)[:, None] * xn
            found = tl.load(source + column, mask=here)
            to = out + (lane * size + row)[:, None] * D + column
            tl.store(to, found, mask=here)


def stack(sources: list[Windows], flipped: bool, *, blocks: Blocks | None = None) -> list[Tensor]:
    """Each source's windows as (t·b h size d), contiguous; starts are evenly spaced, in any order,
    and windows may overlap."""
    require(sources[0].x)
    xs = [x if x.stride(-1) == 1 else x.contiguous() for x, _, _ in sources]
    outs = [
        x.new_empty(len(starts) * x.shape[0], x.shape[1], size, x.shape[3])
        for x, (_, starts, size) in zip(xs, sources, strict=True)
    ]
    (b, _, _, d), end, given = xs[0].shape, 0, []
    blocks = blocks or blocks_for(d)
    for x, out, (_, starts, size) in zip(xs, outs, sources, strict=True):
        begin, runs = end, triton.cdiv(size, blocks.rows)
        end += out.shape[0] * out.shape[1] * runs
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        given.append((x, out, x.shape[1], size, runs, begin, end, starts[0], step, *x.stride()[:3]))
    if end and d:
        kernel: Any = _stack_kernel[(end,)]
        with on_device(xs[0]):
            kernel(tuple(given), b, d, triton.next_power_of_2(d), blocks.rows, flipped,
                   num_warps=blocks.warps, enable_fp_fusion=True)  # fmt: skip
    return outs


def blocks_for(d: int) -> Blocks:
    """Some 4,096 numbers for four warps."""
    return Blocks(max(1, min(64, 4096 // triton.next_power_of_2(max(d, 1)))), 4)
