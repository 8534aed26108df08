"""LongRoPE: each frequency divided by its own searched factor, θ_i / λ_i.

Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens"; Phi-3. Calls no
longer than `original` take the short factors, longer ones the long factors; the length is an input,
fixed for the life of a cache. The temperature √(1 + ln s / ln L) on q and on k squares to log_L(sL)
exactly, which is Su's logn at the target length. The paper's search also leaves the first few
tokens uninterpolated; checkpoints and transformers don't, and neither does this.
"""

import math
from dataclasses import field
from typing import ClassVar

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


@part("longrope", site="frequencies", paper="Ding et al. 2024, arXiv:2402.13753")
class LongRope:
    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int = field(kw_only=True)
    factor: float = 1
    attention_factor: float | None = None
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original", "factor")
        if self.original == 1:
            raise Mistake(
                "longrope: original must be at least 2, but got 1: its logarithm divides."
            )
        if len(self.short) != len(self.long) or not self.short or min(self.short + self.long) <= 0:
            raise Mistake(
                f"longrope: short and long must be as many positive factors, but got "
                f"{len(self.short)} and {len(self.long)}: give one for each rotary pair."
            )

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        factors = self.long if length > self.original else self.short
        if len(factors) != dim // 2:
            raise Mistake(
                f"longrope: {len(factors)} factors for a rotary dimension of {dim}: give "
                f"{dim // 2}, one for each pair."
            )
        return 1.0 / (torch.tensor(factors, dtype=dtype) * powers(dim, base, dtype))

    def attention(self) -> float:
        """The factor on q and on k each."""
        if self.attention_factor is not None:
            return self.attention_factor
        return (
            math.sqrt(1 + math.log(self.factor) / math.log(self.original))
            if self.factor > 1
            else 1.0
        )

    def gain(self, length: int) -> float:
        return self.attention() ** 2
