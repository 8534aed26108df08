"""NTK-ALiBi: the steepest slope stays, the shallowest is divided by the factor, the others in
between.

keezen 2023. m'_h = m_h · s^(-t), t = (ln m_max - ln m_h)/(ln m_max - ln m_min). For a power of two
this is the published m_h / s^((h-1)/(H-1)); for other head counts the published code mixes the
ranks up, and this does not.
"""

import torch
from torch import Tensor

from longitude.part import Dims, Keys, Queries, Rows, Term, Weights, part, positive
from longitude.parts.bias.alibi import linear_term, slopes


def stretched(m: Tensor, factor: float) -> Tensor:
    """Slopes divided by factor^t, t from 0 at the steepest to 1 at the shallowest."""
    log = m.log()
    span = log.max() - log.min()
    t = (log.max() - log) / span if span > 0 else torch.zeros_like(log)
    return m * factor ** (-t)


@part("ntk_alibi", site="bias", paper="keezen 2023, github.com/keezen/ntk_alibi")
class NtkAlibi:
    factor: float
    flat_beyond = None

    def check(self) -> None:
        positive(self, "factor")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}

    def term(
        self, q: Queries, k: Keys, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float
    ) -> Term:
        return linear_term(stretched(slopes(q.shape[1]), self.factor), q, q_pos, k_pos)
