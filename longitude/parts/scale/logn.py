"""logn: queries scaled by log_L n, n the number of keys they may see, L the trained length.

Su 2021, "Entropy invariance of attention" (kexue.fm 8823); Chiang & Cholak 2022. `clip` keeps the
factor at 1 or above, max(1, log_L n): the form for models trained without it, which an unclipped
factor would cool below the trained length (n = 64, L = 512: 0.667). Causal: n = i + 1;
bidirectional: the unpadded keys.
"""

import math

import torch

from longitude.part import Dims, Factors, Mistake, Rows, Weights, part


@part(
    "logn",
    site="scale",
    paper="Su 2021, kexue.fm/archives/8823; Chiang & Cholak 2022, arXiv:2202.12172",
)
class LogN:
    train: int
    clip: bool = True

    def check(self) -> None:
        if self.train < 2:
            raise Mistake(
                f"logn: the trained length must be at least 2, but got {self.train}: its "
                f"logarithm divides."
            )

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        factor = seen.clamp(min=1).to(torch.float64).log() / math.log(self.train)
        return (factor.clamp(min=1) if self.clip else factor)[:, None]
