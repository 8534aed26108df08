"""Windows of rows stacked into a batch, so that tiles of one shape are one call of a kernel.

Evenly spaced windows of one sequence are a view. Several sequences, or rows in reverse (how an
upper triangle becomes a causal one), have to be copied: on a GPU with Triton in one launch for
queries, keys and values (`attention.triton.stack`), elsewhere one by one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.ops.kernels.launch import usable


class Windows(NamedTuple):
    """x[:, :, start : start+size] for each of `starts`, of an x (b h n d)."""

    x: Tensor
    starts: list[int]
    size: int


def stacked(sources: list[Windows], flipped: bool) -> list[Tensor]:
    """Each source's windows as (t·b h size d), their rows in reverse where flipped."""
    if _by_kernel(sources, flipped):
        from longitude.ops.kernels.gather_windows import stack  # late: it imports Triton

        return stack(sources, flipped)
    made = [windows(*source) for source in sources]
    return [(x.flip(3) if flipped else x).flatten(0, 1) for x in made]


def _by_kernel(sources: list[Windows], flipped: bool) -> bool:
    x, starts, _ = sources[0]
    copied = flipped or (x.shape[0] > 1 and len(starts) > 1)
    return copied and usable(x) and all(len(_steps(source.starts)) <= 1 for source in sources)


def windows(x: Tensor, starts: list[int], size: int) -> Tensor:
    """x[:, :, start : start+size] for each start, stacked (t b h size d): a view where evenly
    spaced."""
    if not evenly_apart(starts, size):
        return torch.stack([x[:, :, s : s + size] for s in starts])
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    b, h, n, d = x.stride()
    shape = (len(starts), *x.shape[:2], size, x.shape[3])
    return x.as_strided(shape, (step * n, b, h, n, d), x.storage_offset() + starts[0] * n)


def evenly_apart(starts: list[int], size: int) -> bool:
    """Whether windows of this size are evenly spaced and do not overlap."""
    steps = _steps(starts)
    return len(steps) == 0 or (len(steps) == 1 and min(steps) >= size)


def _steps(starts: list[int]) -> set[int]:
    return {b - a for a, b in pairwise(starts)}
