"""Sums of scores by distance: all that is kept of the pairs of a layer, one row for each head.

Distances |i - j| are put into bins, whose edges are 0, 1, 2, 3, 4, 6, 8, 12, 16, … and one that is
asked for besides.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.inspection.score_rows import Band


class Tally:
    """Counts, sums, squares, extremes and attention of each head in each bin of distances."""

    def __init__(self, heads: int, length: int, edge: int) -> None:
        steps = {0, 1, edge, *(m << s for m in (2, 3) for s in range(40))}
        self.edges = [*sorted(e for e in steps if e < length), length]
        bins = len(self.edges) - 1
        self.count = torch.zeros(bins, dtype=torch.float64)
        self.sums, self.squares, self.mass, self.level, self.swing = torch.zeros(
            5, heads, bins, dtype=torch.float64
        )
        self.least = torch.full((heads, bins), torch.inf, dtype=torch.float64)
        self.greatest = torch.full((heads, bins), -torch.inf, dtype=torch.float64)
        self.first, self.far = torch.zeros(2, heads, dtype=torch.float64)
        self.rows = 0

    def add(
        self,
        queries: Int[Tensor, " m"],
        scores: Float[Tensor, "h m n"],
        seen: Bool[Tensor, "m n"],
        attended: Float[Tensor, "h m n"],
    ) -> None:
        """Take in the scores of some queries with every key."""
        keys = torch.arange(scores.shape[-1])
        mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
        for way in (1, -1):  # behind a query, itself included; ahead of it
            at = queries[:, None] - way * keys
            here = (at >= 0) & (at < len(keys)) & ((keys > 0) | (way == 1))
            at = at.clamp(0, len(keys) - 1)
            here &= seen.gather(1, at)
            if bool(here.any()):
                index = at.expand_as(scores)
                self._by_distance(
                    here, scores.gather(2, index), mean, attended.gather(2, index) * here
                )
        self.first += attended[:, :, 0].sum(1)
        self.rows += len(queries)

    def _by_distance(self, here: Tensor, scores: Tensor, mean: Tensor, attended: Tensor) -> None:
        """The same, with distances in place of keys."""
        low, high = (scores.masked_fill(~here, end) for end in (torch.inf, -torch.inf))
        left, scores = (scores - mean) * here, scores * here
        self.far += (attended * torch.arange(here.shape[1])).sum((1, 2), dtype=torch.float64)
        for n, (a, b) in enumerate(pairwise(self.edges)):
            part = slice(a, b)
            self.count[n] += here[:, part].sum()
            for kept, given in (
                (self.sums, scores[..., part]),
                (self.squares, scores[..., part].square()),
                (self.mass, attended[..., part]),
                (self.level, left[..., part]),
                (self.swing, left[..., part].square()),
            ):
                kept[:, n] += given.sum((1, 2), dtype=torch.float64)
            self.least[:, n] = torch.minimum(self.least[:, n], low[..., part].amin((1, 2)))
            self.greatest[:, n] = torch.maximum(self.greatest[:, n], high[..., part].amax((1, 2)))

    def band(self, head: int, low: int, high: int) -> Band | None:
        """The scores of distances from one edge up to another; None where there are none."""
        part = slice(self.edges.index(low), self.edges.index(high))
        count = float(self.count[part].sum())
        if not count:
            return None
        mean = float(self.sums[head, part].sum()) / count
        square = float(self.squares[head, part].sum()) / count
        return Band(
            count=int(count),
            mean=mean,
            std=max(0.0, square - mean**2) ** 0.5,
            least=float(self.least[head, part].min()),
            greatest=float(self.greatest[head, part].max()),
            mass=float(self.mass[head, part].sum()) / self.rows,
        )

    def explained(self, head: int, high: int) -> float:
        """The share of the variance of scores, each query's mean taken off, that bins of distance
        below `high` explain, adjusted for how many they are:
        1 - (within / (N - bins)) / (whole / (N - 1))."""
        part = slice(0, self.edges.index(high))
        count, sums = self.count[part], self.level[head, part]
        used, total = int((count > 0).sum()), float(count.sum())
        square = float(self.swing[head, part].sum())
        whole = square - float(sums.sum()) ** 2 / max(total, 1.0)
        within = square - float((sums.square() / count.clamp(min=1)).sum())
        if whole <= 1e-12 * max(square, 1e-300) or total <= used:
            return 0.0
        return max(0.0, 1 - (within / (total - used)) / (whole / (total - 1)))

    def sink(self, head: int) -> float:
        """The mean attention on the first token."""
        return float(self.first[head]) / self.rows

    def away(self, head: int) -> float:
        """The mean distance that attention goes."""
        return float(self.far[head] / self.mass[head].sum().clamp(min=1e-300))
