"""Position interpolation: every frequency divided by the factor, θ_i / s.

Chen et al. 2023, "Extending Context Window of Large Language Models via Position Interpolation";
kaiokendev. Weak beyond a factor of 2 without fine-tuning.
"""

from typing import ClassVar

import torch

from longitude.part import Half, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("linear", site="frequencies", paper="Chen et al. 2023, arXiv:2306.15595")
class Linear:
    factor: float
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return 1.0 / powers(dim, base, dtype) / self.factor

    def gain(self, length: int) -> float:
        return 1.0
