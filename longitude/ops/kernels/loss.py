"""Cross-entropy over a slice of logits: each is read once, its gradient written in its place.

A program takes one token's row: the log-sum-exp goes on from the slices before, and nothing needs a
copy in float32. `training.loss.gather` and `training.loss.slopes` are the references.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from longitude.ops.kernels.launch import require

COLUMNS = 4096  # of a row that are read at once


@triton.jit
@no_type_check
def _gather_kernel(logits, y, sums, target_logits, size, by_row, COLUMNS: tl.constexpr):
    """Add a slice to one token's log-sum-exp; note its target's logit."""
    row = tl.program_id(0).to(tl.int64)
    most, total = tl.load(sums + row), 1.0  # an empty sum is -inf: it weighs nothing below
    for left in range(0, size, COLUMNS):
        column = left + tl.arange(0, COLUMNS)
        x = tl.load(logits + row * by_row + column, mask=column < size, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(most, tl.max(x, 0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(x - larger), 0)
        most = larger
    tl.store(sums + row, most + tl.log(total))
    target = tl.load(y + row)
    if (target >= 0) & (target < size):
        tl.store(target_logits + row, tl.load(logits + row * by_row + target).to(tl.float32))


@triton.jit
@no_type_check
def _slopes_kernel(logits, y, sums, by, size, by_row, COLUMNS: tl.constexpr):
    """One token's gradient over a slice, in its logits' place."""
    row = tl.program_id(0).to(tl.int64)
    total, share, target = tl.load(sums + row), tl.load(by + row), tl.load(y + row)
    for left in range(0, size, COLUMNS):
        column = left + tl.arange(0, COLUMNS)
        where = logits + row * by_row + column
        x = tl.load(where, mask=column < size, other=float("-inf")).to(tl.float32)
        slope = (tl.exp(x - total) - tl.where(column == target, 1.0, 0.0)) * share
        tl.store(where, slope.to(logits.dtype.element_ty), mask=column < size)


def gather(
    logits: Float[Tensor, "n size"],
    y: Int[Tensor, " n"],
    sums: Float[Tensor, " n"],
    target_logits: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """As `loss.gather`, into the sums that are given."""
    _launch(_gather_kernel, logits, y, sums, target_logits)
    return sums, target_logits


def slopes(
    logits: Float[Tensor, "n size"],
    y: Int[Tensor, " n"],
    sums: Float[Tensor, " n"],
    by: Float[Tensor, " n"],
) -> Float[Tensor, "n size"]:
    """As `loss.slopes`, over the logits that are given."""
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
