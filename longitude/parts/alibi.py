"""ALiBi and its two training-free extensions: a linear penalty on distance, one slope per head.

    score(i, j) = q_i·k_j / √d - m_h |i - j|

Press et al. 2021 (arXiv:2108.12409) fix the slopes m_h = 2^(-8h/H) before training. Position
interpolation (Al-Khateeb et al. 2023) divides all of them by a factor, NTK-ALiBi (keezen 2023)
mostly the shallow ones. Site ⑤: the three parts share one term and differ in their slopes only.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from longitude.core.lengths import Lengths, Setting, combinations, rounded
from longitude.core.part import Bias, Choice, K, Q, Rows, Term, Weights, part, train_defaults
from longitude.core.validate import NonNegativeFloat, PositiveFloat
from longitude.parts.distance_bias import by_distance


def slopes(heads: int, steepness: float = 8) -> Tensor:
    """The paper's slopes for any number of heads, in float64."""
    power = 2 ** math.floor(math.log2(heads))
    main = 2.0 ** (-steepness * torch.arange(1, power + 1, dtype=torch.float64) / power)
    odd_steps = torch.arange(1, 2 * power + 1, 2, dtype=torch.float64)
    rest = 2.0 ** (-steepness * odd_steps / (2 * power))
    return torch.cat([main, rest[: heads - power]])


def linear_term(
    m: Tensor, q: Tensor, q_pos: Tensor, k_pos: Tensor, future: float = 1, offset: float = 0
) -> Term:
    """-m_h |i - j|, keys ahead at `future` times the slope and `offset` further away."""
    m = m.to(q.device, torch.promote_types(q.dtype, torch.float32))

    def value(h: Tensor, r: Tensor) -> Tensor:
        r = r.to(m.dtype)
        return -m[h] * torch.where(r < 0, future * (offset - r), r)

    return by_distance(q_pos, k_pos, value, cheap=True)


def slope_grid(factor: float, lengths: Lengths) -> Iterable[Setting]:
    """ALiBi extrapolates without any change, so factors below the ratio of the lengths too."""
    small = [rounded(max(1.0, lengths.ratio * by)) for by in (0.25, 0.5, 0.75)]
    return combinations(factor=(*small, *lengths.factors(factor)))


@part("alibi", site="bias", paper="Press et al. 2021, arXiv:2108.12409")
class Alibi(Bias):
    """ALiBi: -m_h · |i - j| added to each score, after the 1/√d scaling and not scaled by it.

    Press et al. 2021, "Train Short, Test Long". Slopes are a geometric sequence fixed before
    training, m_h = 2^(-8h/H), h = 1 … H, for H a power of two; otherwise those of the power P below
    it, then every other slope of 2P. Symmetric slopes cannot distinguish the past from the future,
    which bidirectional models need: `future` multiplies the slope of keys ahead, and `offset` is a
    distance added to keys ahead. (DeepMind's randomized positions take 0.5 off keys behind instead,
    which differs on the diagonal.)
    """

    future: NonNegativeFloat = 1
    offset: float = 0
    steepness: PositiveFloat = 8

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        m = slopes(q.shape[1], self.steepness)
        return linear_term(m, q, q_pos, k_pos, self.future, self.offset)

    training = train_defaults


@part("alibi_interpolated", site="bias", paper="Al-Khateeb et al. 2023, arXiv:2310.13017")
class AlibiInterpolated(Bias):
    """ALiBi with interpolated positions: every slope divided by the factor, m_h / s.

    Al-Khateeb et al. 2023, "Position Interpolation Improves ALiBi Extrapolation". Training-free;
    static slopes keep a cache valid.
    """

    factor: PositiveFloat

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        return linear_term(slopes(q.shape[1]) / self.factor, q, q_pos, k_pos)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor())]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return slope_grid(self.factor, lengths)


def stretched(m: Tensor, factor: float) -> Tensor:
    """Slopes divided by factor^t, t from 0 at the steepest to 1 at the shallowest."""
    log = m.log()
    span = log.max() - log.min()
    t = (log.max() - log) / span if span > 0 else torch.zeros_like(log)
    return m * factor ** (-t)


@part("ntk_alibi", site="bias", paper="keezen 2023, github.com/keezen/ntk_alibi")
class NtkAlibi(Bias):
    """NTK-ALiBi: the steepest slope stays, the shallowest is divided by the factor, the others in
    between.

    keezen 2023. m'_h = m_h · s^(-t), t = (ln m_max - ln m_h)/(ln m_max - ln m_min). For a power of
    two this is the published m_h / s^((h-1)/(H-1)); for other head counts the published code mixes
    the ranks up, and this does not.
    """

    factor: PositiveFloat

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        return linear_term(stretched(slopes(q.shape[1]), self.factor), q, q_pos, k_pos)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor()), cls(lengths.factor(2))]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return slope_grid(self.factor, lengths)
