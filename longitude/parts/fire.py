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

STEPS = 2**14  # steps of f's table: the change within a step is lost in bfloat16's rounding


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
            hidden = torch.relu(share[..., None] * w["inward"] + w["inward_bias"])
            by_head = (hidden @ w["outward"] + w["outward_bias"])[:, 0].movedim(-1, 1)
            return by_head[:, h.flatten()]
        # unit by unit: indexing heads last keeps the term a scalar function of (b, h, i, j)
        out = w["outward_bias"][h]
        for unit in range(len(w["inward"])):
            hidden = torch.relu(share * w["inward"][unit] + w["inward_bias"][unit])
            out = out + hidden * w["outward"][unit][h]
        return out

    def by_share(
        self, q: range, k: range, least: int, more: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tabulate the term of these queries, and of `more` after them, at `STEPS` steps of the
        share: a table (h, STEPS + 1), the pace of each query, c, and the largest |x f'(x)| of each
        head, which bounds how much f changes when a share changes by a small fraction.

        The entry of a pair at distance r >= `least` is the nearest to log2(1 + c r) times its
        query's pace; its error is at most half a step times f's steepest slope.
        """
        w, device, c = self.w, self.q_pos.device, self.w["c"].abs()
        reach = self._reach(torch.arange(q[0], q[-1] + 1 + more, dtype=c.dtype, device=device))
        x = torch.linspace(0, 1, STEPS + 1, dtype=c.dtype, device=device)
        if least < 0 or k[0] < 0:  # else no distance exceeds its query's position
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
        named = dict(zip(self.w, weights, strict=True))
        return FireTerm(self.q_pos, self.k_pos, named, threshold)

    def table(self, heads: int, q: range, k: range) -> Tensor:
        """The term of every distance between two contiguous ranges, the least first:
        (1, h, q, r).

        A share is a factor of the query times a factor of the distance. At most distances a unit is
        off for all of these queries, or linear in their shares for all: then the units add up, and
        two coefficients per distance give all of its pairs. At the few distances where a unit's
        ReLU bends among the queries, it is added pair by pair.
        """
        w, away = self.w, torch.arange(q[0] - k[-1], q[-1] - k[0] + 1)
        psi, pace = self._psi(away.abs()), 1 / self._reach(torch.arange(q[0], q[-1] + 1))
        inward, inward_bias, outward = w["inward"], w["inward_bias"], w["outward"]
        on_at_min, on_at_max = (
            torch.addcmul(inward_bias[:, None], inward[:, None], psi * end) > 0
            for end in pace.aminmax()
        )
        active, bends = on_at_min.to(psi.dtype), []
        for unit in (on_at_min != on_at_max).any(1).nonzero().flatten().tolist():
            columns = (on_at_min[unit] != on_at_max[unit]).nonzero()
            span = slice(int(columns[0]), int(columns[-1]) + 1)
            active[unit, span] = 0
            share = pace[:, None] * psi[span]
            hidden = torch.relu(torch.addcmul(inward_bias[unit], inward[unit], share))
            bends.append((span, outward[unit, :, None, None] * hidden))
        slope = (outward.mT * inward) @ active * psi
        start = (outward.mT * inward_bias) @ active + w["outward_bias"][:, None]
        lines, pairs = torch.stack([slope, start], 1), torch.stack([pace, torch.ones_like(pace)], 1)
        shape = (len(lines), len(pace), len(away))
        out = None if lines.requires_grad else self.scratch(pace, *shape)
        table = torch.bmm(pairs.expand(len(lines), -1, -1), lines, out=out)
        columns, values = [span for span, _ in bends], [x for _, x in bends]
        return _Added.apply(columns, table, *values)[None]  # type: ignore[no-any-return]

    def addends(self, q: range, k: range) -> list[Addend]:
        return []


class _Added(torch.autograd.Function):
    """Add each of `numbers` to its slice of a table's columns, in place. Autograd's own in-place
    addition would copy the table's gradient for every one of them."""

    @staticmethod
    def forward(ctx: Any, columns: list[slice], table: Tensor, *numbers: Tensor) -> Tensor:
        ctx.columns = columns
        ctx.mark_dirty(table)
        for span, values in zip(columns, numbers, strict=True):
            table[..., span] += values
        return table

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        return None, grad, *(grad[..., span] for span in ctx.columns)
