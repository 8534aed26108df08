"""A learned table with interpolated positions: position t reads the table at t / s, between rows.

Zhu et al. 2024, "LongEmbed", position interpolation for absolute positions. With a = ⌊t/s⌋ and f =
t/s - a the code is (1 - f) P[a] + f P[a + 1]; n rows reach s·n positions, the last s - 1 of which
share the last row. Every position but 0 changes, those inside the trained window too.
"""

import torch
from torch import Tensor

from longitude.part import Dims, Mistake, Places, Vectors, Weights, not_negative, part, positive


@part("learned_interpolated", site="embed", paper="Zhu et al. 2024, arXiv:2404.12096")
class LearnedInterpolated:
    length: int
    factor: float
    offset: int = 0

    def check(self) -> None:
        positive(self, "length", "factor")
        not_negative(self, "offset")

    @property
    def reach(self) -> int:
        """How many positions there are."""
        return int(self.length * self.factor)

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02}

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        """The code of each position, from the weight table itself."""
        if pos.numel() and (pos.min() < 0 or pos.max() >= self.reach):
            raise Mistake(
                f"learned_interpolated: {self.length} rows at a factor of {self.factor} reach "
                f"positions 0 to {self.reach - 1}: give positions in that range."
            )
        table, last = table[self.offset :], self.length - 1
        at = pos.to(torch.float64) / self.factor
        low = at.long().clamp(max=last)
        fraction = (at - low).to(table.dtype)[..., None]
        return torch.lerp(table[low], table[(low + 1).clamp(max=last)], fraction)

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + self.rows(weights["table"], pos).to(x.dtype)
