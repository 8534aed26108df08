"""NTK-RoPE mixed: θ_i · exp(-a (i+1)^p), with a (d/2)^p = ln s.

Su 2023 (kexue.fm 9706). p = 0 is position interpolation, p = 1 Su's "fixed" NTK; 0.625 was the best
of the post, 0.75 is what its published patch uses.
"""

import math
from typing import ClassVar

import torch

from longitude.part import Half, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("ntk_mixed", site="frequencies", paper="Su 2023, kexue.fm/archives/9706")
class NtkMixed:
    factor: float
    power: float = 0.625
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        a = math.log(self.factor) / (dim / 2) ** self.power
        i = torch.arange(1, dim // 2 + 1, dtype=dtype)
        return 1.0 / powers(dim, base, dtype) * torch.exp(-a * i**self.power)

    def gain(self, length: int) -> float:
        return 1.0
