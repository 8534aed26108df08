"""FIRE: a learned function of the distance relative to the query's own position.

    bias(i, j) = f(ψ(i - j) / ψ(max(L, i))),  ψ(x) = ln(c x + 1)

Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long Context
Transformers" (arXiv:2310.04418). c and the threshold L are learned, f is 1 → hidden → heads with
ReLU. Site ⑤. The normaliser depends on the query alone, never on the total length, so rows do not
change as a cache grows.
"""

from dataclasses import dataclass

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
        return FireTerm(q_pos, k_pos, weights, (weights["multiplier"] * self.threshold).abs())

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(threshold=length)]


@dataclass(frozen=True, eq=False)
class FireTerm:
    q_pos: Tensor
    k_pos: Tensor
    w: Weights
    threshold: Tensor

    def share(self, here: Tensor, away: Tensor) -> Tensor:
        """ψ(i - j) / ψ(max(L, i))."""
        dtype, c = self.w["c"].dtype, self.w["c"].abs()
        reach = torch.log1p(c * torch.maximum(self.threshold, here.to(dtype)))
        return torch.log1p(c * away.abs().to(dtype)) / (reach + 1e-6)

    def __call__(self, b: Index, h: Index, i: Index, j: Index) -> Tensor:
        w, here = self.w, at(self.q_pos, b, i)
        share = self.share(here, here - at(self.k_pos, b, j))
        # a grid of pairs, the same for every head: all units at once
        if share.dim() == 4 and share.shape[1] == 1 and h.numel() == h.shape[1]:
            seen = torch.relu(share[..., None] * w["inward"] + w["inward_bias"])
            heads = (seen @ w["outward"] + w["outward_bias"])[:, 0].movedim(-1, 1)
            return heads[:, h.flatten()]
        # unit by unit: indexing heads last keeps the term a scalar function of (b, h, i, j)
        out = w["outward_bias"][h]
        for unit in range(len(w["inward"])):
            seen = torch.relu(share * w["inward"][unit] + w["inward_bias"][unit])
            out = out + seen * w["outward"][unit][h]
        return out

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two contiguous ranges, the least first:
        (1, h, q, r). Between the units' kinks f is linear: a lookup instead of all units."""
        w = self.w
        away = torch.arange(q[0] - k[-1], q[-1] - k[0] + 1)
        share = self.share(torch.arange(q[0], q[-1] + 1)[:, None], away)
        kinks = (-w["inward_bias"] / w["inward"]).sort().values
        between = torch.cat([kinks[:1] - 1, (kinks[1:] + kinks[:-1]) / 2, kinks[-1:] + 1])
        active = (between[:, None] * w["inward"] + w["inward_bias"] > 0).to(share.dtype)
        slopes = ((active * w["inward"]) @ w["outward"]).mT.contiguous()
        starts = ((active * w["inward_bias"]) @ w["outward"] + w["outward_bias"]).mT.contiguous()
        piece = torch.bucketize(share.flatten(), kinks, out_int32=True)
        out = share.new_empty(1, heads, *share.shape)
        for h in range(heads):
            at_zero, slope = (x[h].index_select(0, piece).view_as(share) for x in (starts, slopes))
            torch.addcmul(at_zero, slope, share, out=out[0, h])
        return out
