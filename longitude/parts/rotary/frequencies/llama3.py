"""Llama 3.1's scaling: NTK-by-parts with bounds 1 and 4, in wavelengths.

Dubey et al. 2024, "The Llama 3 Herd of Models", and its released code. Wavelengths above
original/low are divided by the factor, below original/high kept, between them mixed by
original/wavelength.
"""

import math
from dataclasses import field
from typing import ClassVar

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("llama3", site="frequencies", paper="Dubey et al. 2024, arXiv:2407.21783")
class Llama3:
    factor: float
    original: int = field(kw_only=True)
    low: float = 1
    high: float = 4
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor", "original", "low")
        if self.low >= self.high:
            raise Mistake(
                f"llama3: low must be below high, but got {self.low} and {self.high}: 1 and 4 "
                f"are usual."
            )

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        theta = 1.0 / powers(dim, base, dtype)
        wavelength = 2 * math.pi / theta
        longest, shortest = self.original / self.low, self.original / self.high
        slow = torch.where(wavelength > longest, theta / self.factor, theta)
        keep = (self.original / wavelength - self.low) / (self.high - self.low)
        mixed = (1 - keep) * slow / self.factor + keep * slow
        between = (wavelength >= shortest) & (wavelength <= longest)
        return torch.where(between, mixed, slow)

    def gain(self, length: int) -> float:
        return 1.0
