"""NTK-by-parts: pairs that turn often inside the window stay, pairs that never turn once are
interpolated.

Peng et al. 2023, section 3.2. r_i = L θ_i / 2π turns inside the window; γ = clip((r_i - low)/(high
- low), 0, 1); θ'_i = (1 - γ) θ_i / s + γ θ_i. The ramp is linear in r, unlike YaRN's released code
(linear in i).
"""

import math
from dataclasses import field
from typing import ClassVar

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("by_parts", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class ByParts:
    factor: float
    original: int = field(kw_only=True)
    low: float = 1
    high: float = 32
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor", "original")
        if self.low >= self.high:
            raise Mistake(
                f"by_parts: low must be below high, but got {self.low} and {self.high}: 1 and "
                f"32 are usual."
            )

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        theta = 1.0 / powers(dim, base, dtype)
        turns = self.original * theta / (2 * math.pi)
        keep = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - keep) * theta / self.factor + keep * theta

    def gain(self, length: int) -> float:
        return 1.0
