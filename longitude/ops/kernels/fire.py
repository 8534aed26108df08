"""FIRE's table of shares in one launch.

`FireTerm.by_share`, its reference, is two dozen small operations on a few thousand numbers: a GPU
would wait for the host between them. The programs of each head tabulate its function; those of an
additional head index compute the pace of each query.
"""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from longitude.core.part import Weights
from longitude.ops.bands import Shares
from longitude.ops.kernels.launch import launch, require, shape
from longitude.parts.fire import STEPS, Fire

LN2 = tl.constexpr(math.log(2))
BLOCK = 1024  # entries per program


@triton.jit
@no_type_check
def _log1p(x):
    """log(1 + x), accurate also for a small x, for which 1 + x is rounded."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit(do_not_specialize=("first", "farthest", "rows"))
@no_type_check
def _kernel(inward, inward_bias, outward, outward_bias, c, multiplier, table, pace, steepest, own_c,
            by_unit, by_head, threshold, first, farthest, rows, heads, HIDDEN: tl.constexpr,
            STEPS: tl.constexpr, BLOCK: tl.constexpr, BEYOND: tl.constexpr):  # fmt: skip
    head, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.abs(tl.load(c).to(tl.float32))
    least = tl.abs(tl.load(multiplier).to(tl.float32) * threshold)
    end = 1.0  # no distance exceeds its query's position
    if BEYOND:
        nearest = _log1p(rate * tl.maximum(least, first.to(tl.float32))) + 1e-6
        end = _log1p(rate * farthest.to(tl.float32)) / nearest + 1e-6
    if head == heads:
        reach = _log1p(rate * tl.maximum(least, (first + at).to(tl.float32))) + 1e-6
        tl.store(pace + at, 1.0 / (end * reach) * (STEPS * LN2), mask=at < rows)
        tl.store(own_c, rate)
    elif tl.program_id(1) * BLOCK <= STEPS:
        x = at * (end / STEPS)
        value = tl.zeros((BLOCK,), tl.float32) + tl.load(outward_bias + head).to(tl.float32)
        slope = tl.zeros((BLOCK,), tl.float32)
        for unit in range(HIDDEN):
            a = tl.load(inward + unit).to(tl.float32)
            weight = tl.load(outward + unit * by_unit + head * by_head).to(tl.float32)
            pre_activation = a * x + tl.load(inward_bias + unit).to(tl.float32)
            value += tl.maximum(pre_activation, 0.0) * weight
            slope += tl.where(pre_activation > 0, a * weight, 0.0)
        tl.store(table + head * (STEPS + 1) + at, value, mask=at <= STEPS)
        change = tl.where(at <= STEPS, tl.abs(slope) * x, 0.0)
        tl.atomic_max(steepest + head, tl.max(change, 0))


def share_table(
    part: Fire, weights: Weights, q: range, k: range, least: int, more: int
) -> tuple[Float[Tensor, "h steps"], Shares]:
    """The table, paces, c and steepest slopes that `by_share` gives, from weights of any dtype."""
    names = ("inward", "inward_bias", "outward", "outward_bias", "c", "multiplier")
    tensors = [weights[name] for name in names]
    require(outward := weights["outward"])
    (hidden, heads), device, rows = outward.shape, outward.device, len(q) + more
    table = torch.empty(heads, STEPS + 1, dtype=torch.float32, device=device)
    pace = torch.empty(rows, dtype=torch.float32, device=device)
    numbers = torch.zeros(heads + -heads % 4 + 1, dtype=torch.float32, device=device)
    shares = Shares(pace, numbers[-1], numbers[:heads])  # both views are aligned
    beyond = least < 0 or k[0] < 0
    args = (
        *tensors, table, pace, shares.steepest, shares.c, *outward.stride(), float(part.threshold),
        q[0], max(q[-1] - k[0], k[-1] - q[0]), rows, heads,
    )  # fmt: skip
    grid = (heads + 1, triton.cdiv(max(STEPS + 1, rows), BLOCK), 1)
    constants = {"HIDDEN": hidden, "STEPS": STEPS, "BLOCK": BLOCK, "BEYOND": beyond}
    key = (*map(shape, tensors), beyond)
    launch(_kernel, grid, args, (*tensors, table, pace), key, lambda: constants)
    return table, shares
