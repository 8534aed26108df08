"""Biases that are functions of the distance: ALiBi and its training-free extensions, Sandwich,
KERPLE and T5's. Site ⑤.
"""

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from longitude.core.lengths import Lengths, Setting, combinations, rounded
from longitude.core.part import (
    Bias,
    Choice,
    Dims,
    K,
    Q,
    Rows,
    Term,
    Weights,
    part,
    train_defaults,
)
from longitude.core.validate import NonNegativeFloat, PositiveFloat, UserError
from longitude.parts.distance_bias import by_distance

MIN_WEIGHT = 0.01  # of KERPLE


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
    """Factors to search, also below the ratio of the lengths: ALiBi extrapolates unchanged."""
    small = [rounded(max(1.0, lengths.ratio * by)) for by in (0.25, 0.5, 0.75)]
    return combinations(factor=(*small, *lengths.factors(factor)))


@part("alibi", site="bias", paper="Press et al. 2021, arXiv:2108.12409")
class Alibi(Bias):
    """ALiBi: -m_h · |i - j| added to each score, after the 1/√d scaling and not scaled by it.

    Press et al. 2021, "Train Short, Test Long". Slopes are a geometric sequence fixed before
    training, m_h = 2^(-8h/H), h = 1 … H, for H a power of two; else those of the next power P below
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


@part("sandwich", site="bias", paper="Chi et al. 2022, arXiv:2212.10356")
class Sandwich(Bias):
    """Sandwich: the inner product of sinusoidal positions as a bias.

        bias_h(i, j) = H / (8h) Σ_t cos((i - j) ω_t),  h = 1 … H,  ω_t = 10000^(-2t/dim), t < dim/2

    Chi et al. 2022, "Dissecting Transformer Length Extrapolation via the Lens of Receptive
    Field Analysis" (arXiv:2212.10356). Site ⑤, no learned weights. The first head weighs
    position most.
    """

    dim: int = 128
    base: PositiveFloat = 10000

    def check(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise UserError(
                f"sandwich: dim must be even and positive, but got {self.dim}: 128 is usual."
            )

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        dtype = torch.promote_types(q.dtype, torch.float32)
        heads = q.shape[1]
        weight = heads / (8 * torch.arange(1, heads + 1, dtype=dtype, device=q.device))
        omega = [self.base ** (-2 * t / self.dim) for t in range(self.dim // 2)]

        def value(h: Tensor, r: Tensor) -> Tensor:
            # angles in float64: distances times frequencies lose their phase in float32 far out
            r = r.abs().to(torch.float64)
            total = torch.zeros_like(r)
            for w in omega:
                total = total + torch.cos(r * w)
            return weight[h] * total.to(dtype)

        return by_distance(q_pos, k_pos, value)

    training = train_defaults


@part("kerple_log", site="bias", paper="Chi et al. 2022, arXiv:2205.09921")
class KerpleLog(Bias):
    """KERPLE, logarithmic: -r1 ln(1 + r2 |i - j|), r1 and r2 learned for each head.

    Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation".
    Weights are clamped to 0.01 or above where they are read, so gradients stay right and no forward
    pass changes them.
    """

    falls_slowly = True  # too slowly for any key to become negligible

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {
            "r1": torch.rand(dims.heads, generator=rng) * 2,
            "r2": torch.rand(dims.heads, generator=rng),
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        wide = torch.promote_types(q.dtype, torch.float32)  # far distances are inexact in half
        r1, r2 = (weights[name].to(wide).clamp(min=MIN_WEIGHT) for name in ("r1", "r2"))

        def value(h: Tensor, r: Tensor) -> Tensor:
            return -r1[h] * torch.log1p(r2[h] * r.abs())

        return by_distance(q_pos, k_pos, value, slices=True)

    training = train_defaults


@part("kerple_power", site="bias", paper="Chi et al. 2022, arXiv:2205.09921")
class KerplePower(Bias):
    """KERPLE, power: -a |i - j|^p with 0 < p <= 2, a and p learned for each head.

    Chi et al. 2022. Weights are clamped to 0.01 or above, p to 2 or below, where they are read.
    """

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {
            "a": torch.rand(dims.heads, generator=rng),
            "p": torch.rand(dims.heads, generator=rng) * 2,
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        wide = torch.promote_types(q.dtype, torch.float32)
        a, p = (weights[name].to(wide) for name in ("a", "p"))
        a, p = a.clamp(min=MIN_WEIGHT), p.clamp(MIN_WEIGHT, 2)

        def value(h: Tensor, r: Tensor) -> Tensor:
            # |r|^p has no gradient in p at r = 0; its value there is 0
            size = r.abs().to(a.dtype)
            return torch.where(
                size > 0, -a[h] * size.clamp(min=1e-6) ** p[h], torch.zeros_like(size)
            )

        return by_distance(q_pos, k_pos, value, slices=True)

    training = train_defaults


def bucket(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each key behind (distance = i - j > 0) or ahead, by float32 logarithms as in
    released checkpoints."""
    ahead = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        ahead, distance = (distance < 0).to(distance.dtype) * buckets, distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = buckets // 2
    large = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large = (exact + (large * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, large) + ahead


@part("t5", site="bias", paper="Raffel et al. 2019, arXiv:1910.10683")
class T5(Bias):
    """T5's bias: one learned number per head for each bucket of distances.

    Raffel et al. 2019, "Exploring the Limits of Transfer Learning" (arXiv:1910.10683). Half of
    the buckets are exact distances, the rest are log-spaced up to `max_distance` and flat
    beyond; `bidirectional` gives each side half of the buckets. T5 itself has no 1/√d on its
    scores: to run its checkpoints pass `scale=1.0` to `attention`. Site ⑤: constant far away,
    so that only a narrow band needs the bias.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    integer_positions: ClassVar[bool] = True

    def check(self) -> None:
        per_side = self.buckets // 2 if self.bidirectional else self.buckets
        if per_side < 2 or self.buckets % (4 if self.bidirectional else 2):
            raise UserError(
                f"t5: {self.buckets} buckets can't be halved evenly: give a multiple of 4, 32 "
                f"is usual."
            )
        if self.max_distance <= per_side // 2:
            raise UserError(
                f"t5: max_distance must exceed {per_side // 2}, the exact buckets, but got "
                f"{self.max_distance}."
            )

    @property
    def flat_beyond(self) -> int | None:
        return self.max_distance

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.buckets, dims.heads, generator=rng) * 0.02}

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        # thousands of distances share a row: gradients are summed in float32 at least
        table = weights["table"].to(torch.promote_types(q.dtype, torch.float32))

        def value(h: Tensor, r: Tensor) -> Tensor:
            return table[self.entry(r), h]

        return by_distance(q_pos, k_pos, value, rows=table)

    def entry(self, distance: Tensor) -> Tensor:
        """The row of the table at each distance."""
        steps = distance.round().to(torch.int64) if distance.is_floating_point() else distance
        return bucket(steps, self.buckets, self.max_distance, self.bidirectional)

    training = train_defaults
