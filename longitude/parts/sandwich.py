"""Sandwich: the inner product of sinusoidal positions as a bias.

    bias_h(i, j) = H / (8h) Σ_t cos((i - j) ω_t),  h = 1 … H,  ω_t = 10000^(-2t/dim), t < dim/2

Chi et al. 2022, "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
Analysis" (arXiv:2212.10356). Site ⑤, no learned weights. The first head weighs position most.
"""

import torch
from torch import Tensor

from longitude.core.part import Bias, K, Q, Rows, Term, Weights, part, train_defaults
from longitude.core.validate import PositiveFloat, UserError
from longitude.parts.distance_bias import by_distance


@part("sandwich", site="bias", paper="Chi et al. 2022, arXiv:2212.10356")
class Sandwich(Bias):
    dim: int = 128
    base: PositiveFloat = 10000

    def check(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise UserError(
                f"sandwich: dim must be even and positive, but got {self.dim}: 128 is usual."
            )

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        dtype = torch.promote_types(q.dtype, torch.float32)
        heads = q.shape[1]
        weight = heads / (8 * torch.arange(1, heads + 1, dtype=dtype, device=q.device))
        omega = [self.base ** (-2 * t / self.dim) for t in range(self.dim // 2)]

        def value(h: Tensor, r: Tensor) -> Tensor:
            # angles in float64: distances times frequencies lose their phase in float32 far out
            r = r.abs().to(torch.float64)
            total = torch.zeros_like(r)
            for w in omega:
                total = total + torch.cos(r * w)
            return weight[h] * total.to(dtype)

        return by_distance(q_pos, k_pos, value)

    training = train_defaults
