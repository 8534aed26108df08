"""Hierarchical positions: a learned table of n rows reaches n² positions.

Su 2020, "Hierarchical decomposition of positions" (kexue.fm 7947). With 0-based position t, q_t = α
u[t // n] + (1 - α) u[t mod n],  u = (P - α P[0]) / (1 - α). The first n positions are the table's
own rows (given back unchanged here, not to rounding). α must not be 0.5, where only n(n+1)/2 codes
differ; 0.4 is the author's choice.
"""

import torch
from torch import Tensor

from longitude.part import Dims, Mistake, Places, Vectors, Weights, not_negative, part, positive


@part("hierarchical", site="embed", paper="Su 2020, kexue.fm/archives/7947")
class Hierarchical:
    length: int
    alpha: float = 0.4
    offset: int = 0

    def check(self) -> None:
        positive(self, "length")
        not_negative(self, "offset")
        if not 0 < self.alpha < 1 or self.alpha == 0.5:
            raise Mistake(
                f"hierarchical: alpha must lie between 0 and 1 and differ from 0.5, but got "
                f"{self.alpha}: 0.4 is usual."
            )

    @property
    def reach(self) -> int:
        """How many positions there are."""
        return self.length**2

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02}

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        """The code of each position, from the weight table itself (never from looked-up rows)."""
        table, n = table[self.offset :], self.length
        if pos.is_floating_point() or (pos.numel() and (pos.min() < 0 or pos.max() >= n * n)):
            raise Mistake(
                f"hierarchical: {n} rows reach whole positions 0 to {n * n - 1}: give positions "
                f"in that range."
            )
        u = (table - self.alpha * table[:1]) / (1 - self.alpha)
        code = self.alpha * u[pos // n] + (1 - self.alpha) * u[pos % n]
        return torch.where((pos < n)[..., None], table[pos.clamp(max=n - 1)], code)

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + self.rows(weights["table"], pos).to(x.dtype)
