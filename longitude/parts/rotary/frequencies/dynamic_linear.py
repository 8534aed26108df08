"""Dynamic position interpolation: θ_i / max(1, l/L), l the length of the call.

Peng et al. 2023, section 3.3 ("Dynamic Scaling"). The length is an input, fixed for the life of a
cache.
"""

from typing import ClassVar

import torch

from longitude.part import Half, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("dynamic_linear", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class DynamicLinear:
    original: int
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return 1.0 / powers(dim, base, dtype) / max(1.0, length / self.original)

    def gain(self, length: int) -> float:
        return 1.0
