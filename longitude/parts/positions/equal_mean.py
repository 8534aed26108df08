"""Equal-mean random positions: 0..n-1 stretched so that the last position has a random size of mean
`mean`.

Su 2023, "Length extrapolation and position robustness" (kexue.fm 9444). Draw N' with mean N =
`mean`, exponential by default or `max` times a Beta variable, and place the tokens evenly on [0,
N']. Because the mean is the training length, plain positions 0..n-1 are right at test time.
Positions are real numbers, so only encodings that are functions of position can take them:
sinusoidal, RoPE, ALiBi and their kin.
"""

from typing import Literal

import torch

from longitude.part import Mistake, Pos, part, positive


@part("equal_mean", site="positions", paper="Su 2023, kexue.fm/archives/9444")
class EqualMean:
    mean: int
    draw: Literal["exponential", "beta"] = "exponential"
    max: int | None = None

    def check(self) -> None:
        positive(self, "mean")
        if self.draw == "beta" and (self.max is None or self.max <= self.mean):
            raise Mistake(
                f"equal_mean: draw='beta' needs max above mean={self.mean}, but got {self.max}: "
                f"give the longest length to cover, as in max={8 * self.mean}."
            )

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            return range(n)
        u = torch.rand((), generator=rng, device=rng.device, dtype=torch.float64)
        # both laws by inverting their distribution function; Beta(1, b) has mean 1 / (1 + b)
        if self.draw == "exponential" or self.max is None:
            end = -torch.log1p(-u) * self.mean
        else:
            end = self.max * (1 - (1 - u) ** (1 / (self.max / self.mean - 1)))
        return torch.linspace(0, 1, n, dtype=torch.float64, device=rng.device) * end
