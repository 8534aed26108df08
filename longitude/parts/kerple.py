"""KERPLE: learned distance kernels as biases, logarithmic or power.

    -r1 ln(1 + r2 |i - j|)  or  -a |i - j|^p,  0 < p <= 2, the weights learned for each head

Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation"
(arXiv:2205.09921). Site ⑤. Weights are clamped where they are read, so gradients
stay right and no forward pass changes them.
"""

import torch
from torch import Tensor

from longitude.core.part import Bias, Dims, K, Q, Rows, Term, Weights, part, train_defaults
from longitude.parts.distance_bias import by_distance

MIN_WEIGHT = 0.01


@part("kerple_log", site="bias", paper="Chi et al. 2022, arXiv:2205.09921")
class KerpleLog(Bias):
    """KERPLE, logarithmic: -r1 ln(1 + r2 |i - j|), r1 and r2 learned for each head.

    Chi et al. 2022. Weights are clamped to 0.01 or above where they are read.
    """

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {
            "r1": torch.rand(dims.heads, generator=rng) * 2,
            "r2": torch.rand(dims.heads, generator=rng),
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        r1, r2 = (weights[name].clamp(min=MIN_WEIGHT) for name in ("r1", "r2"))
        return by_distance(q_pos, k_pos, lambda h, r: -r1[h] * torch.log1p(r2[h] * r.abs()))

    training = train_defaults


@part("kerple_power", site="bias", paper="Chi et al. 2022, arXiv:2205.09921")
class KerplePower(Bias):
    """KERPLE, power: -a |i - j|^p with 0 < p <= 2, a and p learned for each head.

    Chi et al. 2022. Weights are clamped to 0.01 or above, p to 2 or below, where they are read.
    """

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {
            "a": torch.rand(dims.heads, generator=rng),
            "p": torch.rand(dims.heads, generator=rng) * 2,
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        a, p = weights["a"].clamp(min=MIN_WEIGHT), weights["p"].clamp(MIN_WEIGHT, 2)

        def value(h: Tensor, r: Tensor) -> Tensor:
            # |r|^p has no gradient in p at r = 0; its value there is 0
            size = r.abs().to(a.dtype)
            return torch.where(
                size > 0, -a[h] * size.clamp(min=1e-6) ** p[h], torch.zeros_like(size)
            )

        return by_distance(q_pos, k_pos, value)

    training = train_defaults
