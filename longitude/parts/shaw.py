"""Shaw's relative positions: keys (and values) take a learned vector for the clipped offset.

    score(i, j) = q_i·(k_j + aK[r]) / √d,  out_i = Σ_j α_ij (v_j + aV[r]),  r = clip(j - i, -c, c)

Shaw et al. 2018, "Self-Attention with Relative Position Representations" (arXiv:1803.02155).
Site ⑤. The key side is a term like any other; the value side needs the full row of attention
weights, so it runs eagerly only. Tables are shared by the heads.
"""

from typing import ClassVar

import torch
from torch import Tensor

from longitude.core.part import Bias, Choice, Dims, K, Q, Rows, Term, Weights, part
from longitude.core.validate import PositiveInt
from longitude.parts.distance_bias import ByRow


@part("shaw", site="bias", paper="Shaw et al. 2018, arXiv:1803.02155")
class Shaw(Bias):
    clip: PositiveInt
    values: bool = False
    integer_positions: ClassVar[bool] = True

    @property
    def flat_beyond(self) -> int | None:
        return self.clip

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        sides = ("keys", "values") if self.values else ("keys",)
        shape = (2 * self.clip + 1, dims.head_dim)
        return {side: torch.randn(*shape, generator=rng) * dims.head_dim**-0.5 for side in sides}

    def offset(self, i: Tensor, j: Tensor) -> Tensor:
        """The row of the tables for query position i and key position j."""
        return (j - i).round().clamp(-self.clip, self.clip).to(torch.int64) + self.clip

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        vectors = weights["keys"].to(q.dtype)[None]
        return ByRow(q_pos, k_pos, q, vectors, lambda r: self.offset(r, torch.zeros_like(r)))

    def value_term(
        self, attended: Tensor, q_pos: Tensor, k_pos: Tensor, weights: Weights
    ) -> Tensor:
        """Σ_j α_ij aV[clip(j - i)] from the weights α (b h i j)."""
        row = self.offset(q_pos[:, :, None], k_pos[:, None, :])[:, None].expand(attended.shape)
        table = weights["values"].to(attended.dtype)
        mass = attended.new_zeros(*attended.shape[:-1], table.shape[0]).scatter_add(
            -1, row, attended
        )
        return mass @ table

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(max(2, length // 4))]
