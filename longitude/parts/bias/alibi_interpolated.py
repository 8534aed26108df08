"""ALiBi with interpolated positions: every slope divided by the factor, m_h / s.

Al-Khateeb et al. 2023, "Position Interpolation Improves ALiBi Extrapolation". Training-free; static
slopes keep a cache valid.
"""

import torch

from longitude.part import Dims, Keys, Queries, Rows, Term, Weights, part, positive
from longitude.parts.bias.alibi import linear_term, slopes


@part("alibi_interpolated", site="bias", paper="Al-Khateeb et al. 2023, arXiv:2310.13017")
class AlibiInterpolated:
    factor: float
    flat_beyond = None

    def check(self) -> None:
        positive(self, "factor")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}

    def term(
        self, q: Queries, k: Keys, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float
    ) -> Term:
        return linear_term(slopes(q.shape[1]) / self.factor, q, q_pos, k_pos)
