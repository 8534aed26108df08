"""Proportional RoPE: the first `share` of the pairs turn, at the frequencies of the whole head; the
rest stand still.

Gemma 4, as transformers computes it. Unlike a `fraction` of the head, the exponent runs over the
whole dimension, so the pairs that turn are the fastest ones.
"""

from typing import ClassVar

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("proportional", site="frequencies", paper="Gemma Team 2026, transformers 5.22 'proportional'")
class Proportional:
    share: float
    factor: float = 1
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor")
        if not 0 <= self.share <= 1:
            raise Mistake(
                f"proportional: share must lie between 0 and 1, but got {self.share}: 0.25 "
                f"turns a quarter."
            )

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        turning = int(self.share * dim // 2)
        # as many powers as are used: float32's last bit depends on how many are raised at once
        theta = 1.0 / powers(dim, base, dtype, pairs=turning)
        return torch.cat([theta, theta.new_zeros(dim // 2 - turning)]) / self.factor

    def gain(self, length: int) -> float:
        return 1.0
