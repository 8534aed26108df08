"""Dynamic YaRN: YaRN with the factor max(1, l/L), l the length of the call.

Peng et al. 2023, section 3.3. The length is an input, fixed for the life of a cache.
"""

from typing import ClassVar

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.yarn import Yarn


@part("dynamic_yarn", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class DynamicYarn:
    original: int
    fast: float = 32
    slow: float = 1
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original", "slow")
        if self.slow >= self.fast:
            raise Mistake(
                f"dynamic_yarn: slow must be below fast, but got {self.slow} and {self.fast}: 1 "
                f"and 32 are usual."
            )

    def at(self, length: int) -> Yarn:
        """The static YaRN of this length."""
        factor = max(1.0, length / self.original)
        return Yarn(factor, original=self.original, fast=self.fast, slow=self.slow)

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return self.at(length).inv_freq(dim, base, length, dtype)

    def gain(self, length: int) -> float:
        return self.at(length).gain(length)
