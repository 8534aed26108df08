"""YaRN: NTK-by-parts and a temperature, logits × (0.1 ln s + 1)².

Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models". The released
code, all released checkpoints and transformers ramp linearly in the pair's index i ("code"); the
paper's formula ramps linearly in its turns r ("paper"), and differs by up to a factor of 3 on some
pairs. `truncate` rounds the ramp's ends outward. `attention_factor` is the factor on q and on k
each; `mscale` and `mscale_all_dim` (DeepSeek) give it as a ratio where both are set, and `mscale`
alone changes nothing, as in transformers.
"""

import math
from dataclasses import field
from typing import ClassVar, Literal

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.by_parts import ByParts
from longitude.parts.rotary.frequencies.unscaled import powers


def magnitude(factor: float, mscale: float = 1) -> float:
    """0.1 · mscale · ln(factor) + 1 for factors above 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@part("yarn", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class Yarn:
    factor: float
    original: int = field(kw_only=True)
    fast: float = 32
    slow: float = 1
    ramp: Literal["code", "paper"] = "code"
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor", "original", "slow")
        if self.slow >= self.fast:
            raise Mistake(
                f"yarn: slow must be below fast, but got {self.slow} and {self.fast}: 1 and 32 "
                f"are usual."
            )

    def bounds(self, dim: int, base: float) -> tuple[float, float]:
        """The pair indices between which the ramp runs."""
        ends = [
            dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.fast, self.slow)
        ]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if self.truncate else ends
        return max(low, 0), min(high, dim - 1)

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        if self.ramp == "paper":
            mixed = ByParts(self.factor, original=self.original, low=self.slow, high=self.fast)
            return mixed.inv_freq(dim, base, length, dtype)
        low, high = self.bounds(dim, base)
        width = high - low if high != low else 0.001
        stretch = ((torch.arange(dim // 2, dtype=dtype) - low) / width).clamp(0, 1)
        # transformers' order: 1 - (1 - stretch), and the factor multiplied in before the division
        keep, pos = 1 - stretch, powers(dim, base, dtype)
        return 1.0 / (self.factor * pos) * (1 - keep) + 1.0 / pos * keep

    def attention(self) -> float:
        """The factor on q and on k each."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all_dim)
        return magnitude(self.factor)

    def gain(self, length: int) -> float:
        return self.attention() ** 2
