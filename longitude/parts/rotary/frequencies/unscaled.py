"""RoPE's own frequencies: θ_i = base^(-2i/d), i = 0 … d/2 - 1, d the rotary dimension of one head.

Su et al. 2021, "RoFormer". `powers` is where the other scalings start from; it keeps transformers'
order of operations, so that in float32 it gives transformers' bits.
"""

from typing import ClassVar

import torch
from torch import Tensor

from longitude.part import Half, part


def powers(
    dim: int, base: float | Tensor, dtype: torch.dtype = torch.float64, pairs: int | None = None
) -> Tensor:
    """base^(2i/dim): one over the unscaled frequencies, of every pair or of the first few."""
    end = dim if pairs is None else 2 * pairs
    return base ** (torch.arange(0, end, 2, dtype=torch.int64).to(dtype) / dim)


@part("unscaled", site="frequencies", paper="Su et al. 2021, arXiv:2104.09864")
class Unscaled:
    by_length: ClassVar[bool] = False

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return 1.0 / powers(dim, base, dtype)

    def gain(self, length: int) -> float:
        return 1.0
