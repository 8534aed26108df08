"""KERPLE, power: -a |i - j|^p with 0 < p <= 2, a and p learned for each head.

Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation".
Weights are kept at 0.01 or above, p at 2 or below, where they are read, so gradients stay right and
no forward changes them.
"""

import torch
from torch import Tensor

from longitude.part import Dims, Keys, Queries, Rows, Term, Weights, part
from longitude.parts.bias.distance import by_distance

LEAST = 0.01


@part("kerple_power", site="bias", paper="Chi et al. 2022, arXiv:2205.09921")
class KerplePower:
    flat_beyond = None

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {
            "a": torch.rand(dims.heads, generator=rng),
            "p": torch.rand(dims.heads, generator=rng) * 2,
        }

    def term(
        self, q: Queries, k: Keys, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float
    ) -> Term:
        a, p = weights["a"].clamp(min=LEAST), weights["p"].clamp(LEAST, 2)

        def value(h: Tensor, r: Tensor) -> Tensor:
            # |r|^p has no gradient in p at r = 0; its value there is 0
            size = r.abs().to(a.dtype)
            return torch.where(
                size > 0, -a[h] * size.clamp(min=1e-6) ** p[h], torch.zeros_like(size)
            )

        return by_distance(q_pos, k_pos, value)
