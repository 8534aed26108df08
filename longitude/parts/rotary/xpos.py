"""xPos: RoPE whose pairs also decay with distance, score of pair i × ζ_i^((i-j)/σ).

Sun et al. 2022, "A Length-Extrapolatable Transformer". ζ_i = (2i/d + γ)/(1 + γ), γ = 0.4, σ = 512.
As a gain on q of ζ^(m/σ) and on k of ζ^(-n/σ) it would overflow far from 0, so lowering centres it
on the queries at hand, which needs unturned keys and changes no score. Causal only: towards the
future the gain grows without bound.
"""

import math

import torch

from longitude.part import Half, part, positive


@part("xpos", site="decay", paper="Sun et al. 2022, arXiv:2212.10554")
class Xpos:
    gamma: float = 0.4
    scale_base: float = 512

    def check(self) -> None:
        positive(self, "gamma", "scale_base")

    def rate(self, dim: int) -> Half:
        """ln ζ_i / σ: the logarithm of each pair's gain for one step of distance."""
        zeta = (torch.arange(0, dim, 2, dtype=torch.float64) / dim + self.gamma) / (1 + self.gamma)
        return zeta.log() / self.scale_base

    def span(self, dim: int) -> float:
        """The distance over which the fastest pair's gain uses up half of float32's exponents."""
        return math.log(2) * 64 / -float(self.rate(dim).min())
