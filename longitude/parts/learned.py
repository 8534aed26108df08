"""Learned absolute positions, and training-free ways to read a learned table past its end.

    x_t = E[token_t] + P[t]

Gehring et al. 2017 (arXiv:1705.03122); BERT, GPT-2. Past the table's end: hierarchical, n rows for
n² positions (Su 2020), tiled (Beltagy et al. 2020), or interpolated between rows (Zhu et al. 2024).
Site ②; `multiplicative` multiplies the table into the embeddings instead.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from longitude.core.lengths import Lengths, Setting, combinations
from longitude.core.part import Choice, Dims, Embed, TokenPositions, Vectors, Weights, part
from longitude.core.validate import NonNegativeInt, PositiveFloat, PositiveInt, UserError


class Table(Embed, Protocol):
    """A learned table that is added to the embeddings; parts differ in which row a position reads.

    `offset` skips rows that a checkpoint keeps for padding (RoBERTa, BART and OPT: 2).
    """

    length: PositiveInt
    offset: NonNegativeInt

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        """The vector of each position, from the weight table itself."""
        ...

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02}

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors:
        return x + self.rows(weights["table"], pos).to(x.dtype)


def own_rows(name: str, table: Tensor, pos: Tensor, offset: int = 0) -> Tensor:
    """The table's rows at these positions; raises for positions it has no row for."""
    if pos.is_floating_point():
        raise UserError(
            f"{name}: a table has no row for real-valued positions: use sinusoidal() or rope()."
        )
    length = table.shape[0] - offset
    if pos.numel() and not torch.compiler.is_compiling():
        low, high = torch.aminmax(pos)
        if low < 0 or high >= length:
            raise UserError(
                f"{name}: position {int(high if high >= length else low)} is outside the table of "
                f"{length} positions: learned ones read on to {length**2} as "
                f"hierarchical({length})."
            )
    return table[pos + offset]


@part("learned", site="embed", paper="Gehring et al. 2017, arXiv:1705.03122")
class Learned(Table):
    """Learned absolute positions: x_t = E[token_t] + P[t], P a table of `length` rows.

    Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; BERT, GPT-2. There is no row
    past the table. `offset` skips rows that a checkpoint keeps for padding (RoBERTa, BART and OPT:
    2).
    """

    length: PositiveInt
    offset: NonNegativeInt = 0

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        return own_rows("learned", table, pos, self.offset)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(length)]


@part("hierarchical", site="embed", paper="Su 2020, kexue.fm/archives/7947")
class Hierarchical(Table):
    """Hierarchical positions: a learned table of n rows reaches n² positions.

    Su 2020, "Hierarchical decomposition of positions" (kexue.fm 7947). With 0-based position t, q_t
    = α u[t // n] + (1 - α) u[t mod n],  u = (P - α P[0]) / (1 - α). The first n positions are the
    table's own rows (returned exactly here, without rounding). α must not be 0.5, where only
    n(n+1)/2 codes differ; 0.4 is the author's choice.
    """

    length: PositiveInt
    alpha: float = 0.4
    offset: NonNegativeInt = 0

    def check(self) -> None:
        if not 0 < self.alpha < 1 or self.alpha == 0.5:
            raise UserError(
                f"hierarchical: alpha must lie between 0 and 1 and differ from 0.5, but got "
                f"{self.alpha}: 0.4 is usual."
            )

    @property
    def reach(self) -> int:
        """The number of positions."""
        return self.length**2

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        table, n = table[self.offset :], self.length
        if pos.is_floating_point() or (pos.numel() and (pos.min() < 0 or pos.max() >= n * n)):
            raise UserError(
                f"hierarchical: {n} rows reach integer positions 0 to {n * n - 1}: give positions "
                f"in that range."
            )
        u = (table - self.alpha * table[:1]) / (1 - self.alpha)
        code = self.alpha * u[pos // n] + (1 - self.alpha) * u[pos % n]
        return torch.where((pos < n)[..., None], table[pos.clamp(max=n - 1)], code)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(alpha=(0.1, 0.2, 0.3, 0.4, 0.6, self.alpha))

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(length)]


@part("learned_tiled", site="embed", paper="Beltagy et al. 2020, arXiv:2004.05150")
class LearnedTiled(Table):
    """A learned table read over and over: position t takes row t mod n.

    Beltagy et al. 2020, "Longformer", start a table of 4,096 positions from eight copies of
    RoBERTa's 512 rows. Near tokens keep their trained differences except where two copies meet; a
    distance of n is indistinguishable from 0.
    """

    length: PositiveInt
    offset: NonNegativeInt = 0
    reach = None  # unbounded

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        if pos.is_floating_point() or (pos.numel() and pos.min() < 0):
            raise UserError(
                "learned_tiled: a table has rows for integer positions from 0 on: give such."
            )
        return table[pos % self.length + self.offset]

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained)]


@part("learned_interpolated", site="embed", paper="Zhu et al. 2024, arXiv:2404.12096")
class LearnedInterpolated(Table):
    """A learned table with interpolated positions: position t reads the table at t / s, between
    rows.

    Zhu et al. 2024, "LongEmbed", position interpolation for absolute positions. With a = ⌊t/s⌋ and
    f = t/s - a the code is (1 - f) P[a] + f P[a + 1]; n rows reach s·n positions, the last s - 1 of
    which share the last row. Every position but 0 changes, those inside the trained window too.
    """

    length: PositiveInt
    factor: PositiveFloat
    offset: NonNegativeInt = 0

    @property
    def reach(self) -> int:
        """The number of positions."""
        return int(self.length * self.factor)

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        if pos.numel() and (pos.min() < 0 or pos.max() >= self.reach):
            raise UserError(
                f"learned_interpolated: {self.length} rows at a factor of {self.factor} reach "
                f"positions 0 to {self.reach - 1}: give positions in that range."
            )
        table, last = table[self.offset :], self.length - 1
        scaled = pos.to(torch.float64) / self.factor
        low = scaled.long().clamp(max=last)
        fraction = (scaled - low).to(table.dtype)[..., None]
        return torch.lerp(table[low], table[(low + 1).clamp(max=last)], fraction)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained, lengths.factor())]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(factor=lengths.factors(self.factor))


@part("multiplicative", site="embed", paper="Su 2021, kexue.fm/archives/8130")
class Multiplicative(Embed):
    """Multiplicative positions: x_t ⊗ (1 + p_t), p a learned table.

    Su 2021, "Transformer position encodings that rack researchers' brains" (kexue.fm 8130) names
    the idea, x_t ⊗ p_t; writing it as 1 + p makes a table of zeros the identity, so that training
    can start from any model.
    """

    length: PositiveInt

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.zeros(self.length, dims.dim)}

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors:
        return x * (1 + own_rows("multiplicative", weights["table"], pos)).to(x.dtype)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(length)]
