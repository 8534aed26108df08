"""FIRE: a learned function of the distance relative to the query's own position.

    bias(i, j) = f(ψ(i - j) / ψ(max(L, i))),  ψ(x) = ln(c x + 1)

Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long Context
Transformers" (arXiv:2310.04418). c and the threshold L are learned, f is 1 → hidden → heads with
ReLU. Site ⑤. The normaliser depends on the query alone, never on the total length, so rows do not
change as a cache grows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longitude.core.part import Bias, Choice, Dims, Index, K, Q, Rows, Term, Weights, part
from longitude.core.validate import PositiveFloat, PositiveInt
from longitude.parts.distance_bias import Scratch, at

CACHED_UNITS = 2**19  # numbers


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
    scratch: Scratch = field(default_factory=Scratch)

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
        (1, h, q, r).

        With its kink at z, a unit relu(w x + b) is |w| (max(x, z) - z) where w > 0 and
        |w| (max(x, z) - x) elsewhere; one without a kink among these x is a line, or zero. So f is
        a product with 1, x and every max(x, z), for as many x as a core's cache holds.
        """
        w, away = self.w, torch.arange(q[0] - k[-1], q[-1] - k[0] + 1)
        share = self.share(torch.arange(q[0], q[-1] + 1)[:, None], away)
        ends = torch.stack(share.aminmax())[:, None] * w["inward"] + w["inward_bias"] > 0
        bent, up, line = ends[0] != ends[1], w["inward"] > 0, ends.all(0).to(share.dtype)
        kinks = -w["inward_bias"][bent] / w["inward"][bent]
        steep = w["inward"][bent].abs()[:, None] * w["outward"][bent]
        slope = (line * w["inward"]) @ w["outward"] - steep[~up[bent]].sum(0)
        start = (line * w["inward_bias"]) @ w["outward"] - (kinks * up[bent]) @ steep
        outward = torch.stack([start + w["outward_bias"], slope, *steep], 1)
        size = CACHED_UNITS // outward.shape[1]
        units = share.new_ones(outward.shape[1], size)
        out = self.scratch(share, heads, share.numel())
        for some, bias in zip(share.flatten().split(size), out.split(size, 1), strict=True):
            seen = units[:, : len(some)]
            seen[1] = some
            torch.maximum(some, kinks[:, None], out=seen[2:])
            torch.mm(outward, seen, out=bias)
        return out.view(1, heads, *share.shape)
