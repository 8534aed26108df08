"""FIRE: a learned function of the distance relative to the query's own position. Site ⑤.

    bias(i, j) = f(ψ(i - j) / ψ(max(L, i))),  ψ(x) = ln(c x + 1)

Li et al. 2023, "Functional Interpolation for Relative Positions Improves Long Context Transformers"
(arXiv:2310.04418). c and the threshold L are learned, f is 1 → hidden → heads with ReLU. The
normaliser depends on the query alone, never on the total length, so rows do not change as a cache
grows.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longitude.core.part import Bias, Choice, Dims, Index, K, Q, Rows, Term, Weights, part
from longitude.core.validate import PositiveFloat, PositiveInt
from longitude.parts.distance_bias import Addend, Scratch, at

CACHED_UNITS = 2**19  # numbers of FIRE's units
STEPS = 2**14  # of its function's table: what a step changes is lost in bfloat16's rounding


@part("fire", site="bias", paper="Li et al. 2023, arXiv:2310.04418")
class Fire(Bias):
    hidden: PositiveInt = 32
    threshold: PositiveFloat = 512
    c: PositiveFloat = 0.1
    falls_slowly = True
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
        """The distance normalised by the query's position: ψ(i - j) / ψ(max(L, i))."""
        return self._psi(away.abs()) / self._reach(here)

    def _psi(self, x: Tensor) -> Tensor:
        return torch.log1p(self.w["c"].abs() * x.to(self.w["c"].dtype))

    def _reach(self, here: Tensor) -> Tensor:
        return self._psi(torch.maximum(self.threshold, here.to(self.threshold.dtype))) + 1e-6

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

    def by_share(
        self, q: range, k: range, least: int, more: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The term of these queries, and `more` after them, by the nearest of `STEPS` shares: a
        table (h, steps), the pace of each query, c, and the steepest x f'(x) of each head, which
        says how little f changes as shares do by a small part.

        The entry of a pair `least` or more apart is the nearest to log2(1 + c r) times its query's
        pace; it is off by at most half a step times f's steepest slope.
        """
        w, device, c = self.w, self.q_pos.device, self.w["c"].abs()
        reach = self._reach(torch.arange(q[0], q[-1] + 1 + more, dtype=c.dtype, device=device))
        x = torch.linspace(0, 1, STEPS + 1, dtype=c.dtype, device=device)
        if least < 0 or k[0] < 0:  # else no distance is more than its query's position
            farthest = torch.full((), max(q[-1] - k[0], k[-1] - q[0]), device=device)
            x = x * (self._psi(farthest) / reach[0] + 1e-6)
        units = torch.addcmul(w["inward_bias"][:, None], w["inward"][:, None], x).relu_()
        table = torch.addmm(w["outward_bias"][:, None], w["outward"].mT, units)
        steps = torch.arange(1, STEPS + 1, dtype=c.dtype, device=device)
        steepest = torch.linalg.vector_norm(table.diff() * steps, torch.inf, dim=1)
        return table, STEPS * math.log(2) / (x[-1] * reach), c, steepest

    @property
    def sources(self) -> tuple[Tensor, ...]:
        return (self.threshold, *self.w.values())

    def with_sources(self, sources: tuple[Tensor, ...]) -> "FireTerm":
        threshold, *weights = sources
        own = dict(zip(self.w, weights, strict=True))
        return FireTerm(self.q_pos, self.k_pos, own, threshold)

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two contiguous ranges, the least first:
        (1, h, q, r)."""
        away = torch.arange(q[0] - k[-1], q[-1] - k[0] + 1)
        share = self.share(torch.arange(q[0], q[-1] + 1)[:, None], away)
        units = [self.w[name] for name in ("inward", "inward_bias", "outward", "outward_bias")]
        return _Units.apply(self.scratch, share, *units)  # type: ignore[no-any-return]

    def addends(self, q: range, k: range) -> list[Addend]:
        return []


class _Units(torch.autograd.Function):
    """FIRE's f of many shares (q r), as many at once as a core's cache holds: (1 h q r).

    With its kink at z, a unit relu(w x + b) is |w| (max(x, z) - z) where w > 0 and
    |w| (max(x, z) - x) elsewhere; one without a kink among these x is a line, or zero. So f is a
    product with 1, x and every max(x, z).
    """

    @staticmethod
    def forward(ctx: Any, scratch: Scratch, share: Tensor, inward: Tensor, inward_bias: Tensor,
                outward: Tensor, outward_bias: Tensor) -> Tensor:  # fmt: skip
        ctx.save_for_backward(share, inward, inward_bias, outward)
        ends = torch.stack(share.aminmax())[:, None] * inward + inward_bias > 0
        bent, up, line = ends[0] != ends[1], inward > 0, ends.all(0).to(share.dtype)
        kinks = -inward_bias[bent] / inward[bent]
        steep = inward[bent].abs()[:, None] * outward[bent]
        slope = (line * inward) @ outward - steep[~up[bent]].sum(0)
        start = (line * inward_bias) @ outward - (kinks * up[bent]) @ steep
        factors = torch.stack([start + outward_bias, slope, *steep], 1)
        size = CACHED_UNITS // factors.shape[1]
        units = share.new_ones(factors.shape[1], size)
        shape = (1, len(outward_bias), *share.shape)
        out = share.new_empty(shape) if any(ctx.needs_input_grad) else scratch(share, *shape)
        biases = out.view(len(outward_bias), -1).split(size, 1)
        for some, bias in zip(share.flatten().split(size), biases, strict=True):
            seen = units[:, : len(some)]
            seen[1] = some
            torch.maximum(some, kinks[:, None], out=seen[2:])
            torch.mm(factors, seen, out=bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        share, inward, inward_bias, outward = ctx.saved_tensors
        grad, size = grad_outputs[0][0].flatten(1), CACHED_UNITS // len(inward)
        d_share = torch.empty_like(share)
        sums = [torch.zeros_like(x) for x in (inward, inward_bias, outward)]
        parts = (share.flatten().split(size), grad.split(size, 1), d_share.view(-1).split(size))
        for x, own, out in zip(*parts, strict=True):
            units = torch.addcmul(inward_bias[:, None], inward[:, None], x).relu_()
            of_units = torch.ops.aten.threshold_backward(outward @ own, units, 0)
            torch.mv(of_units.mT, inward, out=out)
            sums[0].addmv_(of_units, x)
            sums[1] += of_units.sum(1)
            sums[2].addmm_(units, own.mT)
        return None, d_share, *sums, grad.sum(1)
