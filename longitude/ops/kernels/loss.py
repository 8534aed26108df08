"""Cross-entropy over a slice of logits: each is read once, and its gradient is written over it.

A program takes one token's row. The log-sum-exp continues from the slices before, and nothing needs
a copy in float32. `training.loss.gather` and `training.loss.slopes` are the references.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from longitude.ops.kernels.launch import require

COLUMNS = 4096  # of a row, read at once


@triton.jit
@no_type_check
def _gather_kernel(logits, y, sums, target_logits, size, by_row, COLUMNS: tl.constexpr):
    """Add a slice to one token's log-sum-exp; store its target's logit if it is in the slice."""
    row = tl.program_id(0).to(tl.int64)
    row_max, total = tl.load(sums + row), 1.0  # an empty sum is -inf and adds nothing below
    for left in range(0, size, COLUMNS):
        column = left + tl.arange(0, COLUMNS)
        x = tl.load(logits + row * by_row + column, mask=column < size, other=float("-inf"))
        x = x.to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, 0))
        total = total * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max), 0)
        row_max = new_max
    tl.store(sums + row, row_max + tl.log(total))
    target = tl.load(y + row)
    if (target >= 0) & (target < size):
        tl.store(target_logits + row, tl.load(logits + row * by_row + target).to(tl.float32))


@triton.jit
@no_type_check
def _slopes_kernel(logits, y, sums, by, size, by_row, COLUMNS: tl.constexpr):
    """Write one token's gradient over its logits of a slice."""
    row = tl.program_id(0).to(tl.int64)
    row_lse, weight, target = tl.load(sums + row), tl.load(by + row), tl.load(y + row)
    for left in range(0, size, COLUMNS):
        column = left + tl.arange(0, COLUMNS)
        pointers = logits + row * by_row + column
        x = tl.load(pointers, mask=column < size, other=float("-inf")).to(tl.float32)
        slope = (tl.exp(x - row_lse) - tl.where(column == target, 1.0, 0.0)) * weight
        tl.store(pointers, slope.to(logits.dtype.element_ty), mask=column < size)


def gather(
    logits: Float[Tensor, "n size"],
    y: Int[Tensor, " n"],
    sums: Float[Tensor, " n"],
    target_logits: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The kernel of `training.loss.gather`, which updates `sums` and `target_logits` in place."""
    _launch(_gather_kernel, logits, y, sums, target_logits)
    return sums, target_logits


def slopes(
    logits: Float[Tensor, "n size"],
    y: Int[Tensor, " n"],
    sums: Float[Tensor, " n"],
    by: Float[Tensor, " n"],
) -> Float[Tensor, "n size"]:
    """The kernel of `training.loss.slopes`, which overwrites `logits`."""
    _launch(_slopes_kernel, logits, y, sums, by)
    return logits


def _launch(kernel: Any, logits: Tensor, *others: Tensor) -> None:
    require(logits)
    assert logits.stride(1) == 1
    assert all(x.is_contiguous() and x.dtype in (torch.float32, torch.int64) for x in others)
    if not logits.numel():
        return
    with torch.cuda.device_of(logits):
        kernel[(len(logits),)](
            logits, *others, logits.shape[1], logits.stride(0), COLUMNS=COLUMNS, num_warps=8
        )
