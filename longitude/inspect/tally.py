"""Sums of scores by distance: all that is kept of the pairs of a layer, one row for each head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.inspect.score_rows import Band


class Tally:
    """Counts, sums, squares, extremes and attention of each head at each distance |i - j|."""

    def __init__(self, heads: int, length: int) -> None:
        self.count = torch.zeros(length, dtype=torch.float64)
        self.sums, self.squares, self.mass, self.level, self.swing = torch.zeros(
            5, heads, length, dtype=torch.float64
        )
        self.least = torch.full((heads, length), torch.inf, dtype=torch.float64)
        self.greatest = torch.full((heads, length), -torch.inf, dtype=torch.float64)
        self.first = torch.zeros(heads, dtype=torch.float64)
        self.rows = 0

    def add(
        self,
        queries: Int[Tensor, " m"],
        scores: Float[Tensor, "h m n"],
        seen: Bool[Tensor, "m n"],
        attended: Float[Tensor, "h m n"],
    ) -> None:
        """Take in the scores of some queries with every key."""
        scores, attended = scores.double(), attended.double()
        away = (queries[:, None] - torch.arange(scores.shape[-1])).abs()[seen]
        mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        values, left = scores[:, seen], (scores - mean)[:, seen]
        self.count.index_add_(0, away, torch.ones(len(away), dtype=torch.float64))
        for kept, given in (
            (self.sums, values),
            (self.squares, values.square()),
            (self.mass, attended[:, seen]),
            (self.level, left),
            (self.swing, left.square()),
        ):
            kept.index_add_(1, away, given)
        index = away.expand(len(values), -1)
        self.least.scatter_reduce_(1, index, values, "amin")
        self.greatest.scatter_reduce_(1, index, values, "amax")
        self.first += attended[:, :, 0].sum(1)
        self.rows += len(queries)

    def edges(self) -> list[int]:
        """Where bins begin: 0, 1, 2, 3, 4, 6, 8, 12, 16, …"""
        steps = {0, 1, *(m << s for m in (2, 3) for s in range(40))}
        return sorted(e for e in steps if e < len(self.count))

    def band(self, head: int, low: int, high: int) -> Band | None:
        """The scores of distances from low up to high; None where there are none."""
        count = float(self.count[low:high].sum())
        if not count:
            return None
        mean = float(self.sums[head, low:high].sum()) / count
        square = float(self.squares[head, low:high].sum()) / count
        return Band(
            count=int(count),
            mean=mean,
            std=max(0.0, square - mean**2) ** 0.5,
            least=float(self.least[head, low:high].min()),
            greatest=float(self.greatest[head, low:high].max()),
            mass=float(self.mass[head, low:high].sum()) / self.rows,
        )

    def explained(self, head: int, edges: Sequence[int]) -> float:
        """The share of the variance of scores, each query's mean taken off, that bins of distance
        explain, adjusted for how many there are: 1 - (within / (N - k)) / (whole / (N - 1))."""
        counts, sums = [], []
        for a, b in pairwise(edges):
            counts.append(float(self.count[a:b].sum()))
            sums.append(float(self.level[head, a:b].sum()))
        total, square = sum(counts), float(self.swing[head, edges[0] : edges[-1]].sum())
        whole = square - sum(sums) ** 2 / total
        within = square - sum(s**2 / c for s, c in zip(sums, counts, strict=True) if c)
        used = sum(1 for c in counts if c)
        if whole <= 1e-12 * max(square, 1e-300) or total <= used:
            return 0.0
        return max(0.0, 1 - (within / (total - used)) / (whole / (total - 1)))

    def sink(self, head: int) -> float:
        """The mean attention on the first token."""
        return float(self.first[head]) / self.rows

    def away(self, head: int) -> float:
        """The mean distance that attention goes."""
        mass = self.mass[head]
        far = torch.arange(len(mass), dtype=torch.float64)
        return float((mass * far).sum() / mass.sum().clamp(min=1e-300))
