"""FIRE: a learned function of the distance relative to the query's own position.

    bias(i, j) = f(ψ(i - j) / ψ(max(L, i))),  ψ(x) = ln(c x + 1)

Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long Context
Transformers" (arXiv:2310.04418). c and the threshold L are learned, f is 1 → hidden → heads with
ReLU. Site ⑤. The normaliser depends on the query alone, never on the total length, so rows do not
change as a cache grows.
"""

import torch
from torch import Tensor

from longitude.core.part import Bias, Choice, Dims, Index, K, Q, Rows, Term, Weights, part
from longitude.core.validate import PositiveFloat, PositiveInt
from longitude.parts.distance_bias import at


@part("fire", site="bias", paper="Li et al. 2023, arXiv:2310.04418")
class Fire(Bias):
    hidden: PositiveInt = 32
    threshold: PositiveFloat = 512
    c: PositiveFloat = 0.1
    many_reads = True  # its weights are read unit by unit, which compiled flex can't differentiate

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {
            "inward": torch.randn(self.hidden, generator=rng),
            "inward_bias": torch.randn(self.hidden, generator=rng) * 0.1,
            "outward": torch.randn(self.hidden, dims.heads, generator=rng) * self.hidden**-0.5,
            "outward_bias": torch.zeros(dims.heads),
            "c": torch.tensor(float(self.c)),
            "multiplier": torch.tensor(1.0),
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        w = weights
        dtype = w["c"].dtype

        def psi(x: Tensor) -> Tensor:
            return torch.log1p(w["c"].abs() * x)

        threshold = (w["multiplier"] * self.threshold).abs()

        def term(b: Index, h: Index, i: Index, j: Index) -> Tensor:
            here = at(q_pos, b, i).to(dtype)
            share = psi((here - at(k_pos, b, j)).abs()) / (
                psi(torch.maximum(threshold, here)) + 1e-6
            )
            # a grid of pairs, the same for every head: all units at once
            if share.dim() == 4 and share.shape[1] == 1 and h.numel() == h.shape[1]:
                seen = torch.relu(share[..., None] * w["inward"] + w["inward_bias"])
                heads = (seen @ w["outward"] + w["outward_bias"])[:, 0].movedim(-1, 1)
                return heads[:, h.flatten()]
            # unit by unit: indexing heads last keeps the term a scalar function of (b, h, i, j)
            out = w["outward_bias"][h]
            for unit in range(self.hidden):
                seen = torch.relu(share * w["inward"][unit] + w["inward_bias"][unit])
                out = out + seen * w["outward"][unit][h]
            return out

        return term

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(threshold=length)]
