"""Learned absolute positions, and training-free ways to read a learned table past its end.

    x_t = E[token_t] + P[t]

Gehring et al. 2017 (arXiv:1705.03122); BERT, GPT-2. Past the table's end: interpolated between rows
(Zhu et al. 2024), tiled (Beltagy et al. 2020), or hierarchical, n rows for n² positions (Su 2020).
Site ②; `multiplicative` multiplies the table into the embeddings instead.
"""

import torch
from torch import Tensor

from longitude.core.part import Dims, Places, Vectors, Weights, not_negative, part, positive
from longitude.core.validate import UserError


def rows(name: str, table: Tensor, pos: Tensor, offset: int = 0) -> Tensor:
    """The table's rows at these positions, or a sentence about the one that is not there."""
    if pos.is_floating_point():
        raise UserError(
            f"{name}: a table has no row for real-valued positions: use sinusoidal() or rope()."
        )
    held = table.shape[0] - offset
    if pos.numel() and not torch.compiler.is_compiling():
        low, high = torch.aminmax(pos)
        if low < 0 or high >= held:
            raise UserError(
                f"{name}: position {int(high if high >= held else low)} is outside the table "
                f"of {held} positions: learned ones read on to {held**2} as hierarchical({held})."
            )
    return table[pos + offset]


@part("learned", site="embed", paper="Gehring et al. 2017, arXiv:1705.03122")
class Learned:
    """Learned absolute positions: x_t = E[token_t] + P[t], P a table of `length` rows.

    Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; BERT, GPT-2. There is no row
    past the table. `offset` skips rows that a checkpoint keeps for padding (RoBERTa, BART and OPT:
    2).
    """

    length: int
    offset: int = 0

    def check(self) -> None:
        positive(self, "length")
        not_negative(self, "offset")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        table = torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02
        return {"table": table}

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + rows("learned", weights["table"], pos, self.offset).to(x.dtype)


@part("learned_interpolated", site="embed", paper="Zhu et al. 2024, arXiv:2404.12096")
class LearnedInterpolated:
    """A learned table with interpolated positions: position t reads the table at t / s, between
    rows.

    Zhu et al. 2024, "LongEmbed", position interpolation for absolute positions. With a = ⌊t/s⌋ and
    f = t/s - a the code is (1 - f) P[a] + f P[a + 1]; n rows reach s·n positions, the last s - 1 of
    which share the last row. Every position but 0 changes, those inside the trained window too.
    """

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
            raise UserError(
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


@part("learned_tiled", site="embed", paper="Beltagy et al. 2020, arXiv:2004.05150")
class LearnedTiled:
    """A learned table read over and over: position t takes row t mod n.

    Beltagy et al. 2020, "Longformer", start a table of 4,096 positions from eight copies of
    RoBERTa's 512 rows. Near tokens keep their trained differences except where two copies meet; a
    distance of n can't be told from 0.
    """

    length: int
    offset: int = 0
    reach = None  # it never ends

    def check(self) -> None:
        positive(self, "length")
        not_negative(self, "offset")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02}

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        """The code of each position, from the weight table itself."""
        if pos.is_floating_point() or (pos.numel() and pos.min() < 0):
            raise UserError(
                "learned_tiled: a table has rows for whole positions from 0 on: give such."
            )
        return table[pos % self.length + self.offset]

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + self.rows(weights["table"], pos).to(x.dtype)


@part("hierarchical", site="embed", paper="Su 2020, kexue.fm/archives/7947")
class Hierarchical:
    """Hierarchical positions: a learned table of n rows reaches n² positions.

    Su 2020, "Hierarchical decomposition of positions" (kexue.fm 7947). With 0-based position t, q_t
    = α u[t // n] + (1 - α) u[t mod n], u = (P - α P[0]) / (1 - α). The first n positions are the
    table's own rows (given back unchanged here, not to rounding). α must not be 0.5, where only
    n(n+1)/2 codes differ; 0.4 is the author's choice.
    """

    length: int
    alpha: float = 0.4
    offset: int = 0

    def check(self) -> None:
        positive(self, "length")
        not_negative(self, "offset")
        if not 0 < self.alpha < 1 or self.alpha == 0.5:
            raise UserError(
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
            raise UserError(
                f"hierarchical: {n} rows reach whole positions 0 to {n * n - 1}: give positions "
                f"in that range."
            )
        u = (table - self.alpha * table[:1]) / (1 - self.alpha)
        code = self.alpha * u[pos // n] + (1 - self.alpha) * u[pos % n]
        return torch.where((pos < n)[..., None], table[pos.clamp(max=n - 1)], code)

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + self.rows(weights["table"], pos).to(x.dtype)


@part("multiplicative", site="embed", paper="Su 2021, kexue.fm/archives/8130")
class Multiplicative:
    """Multiplicative positions: x_t ⊗ (1 + p_t), p a learned table.

    Su 2021, "Transformer position encodings that rack researchers' brains" (kexue.fm 8130) names
    the idea, x_t ⊗ p_t; writing it as 1 + p makes a table of zeros the identity, so that training
    can start from any model.
    """

    length: int

    def check(self) -> None:
        positive(self, "length")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.zeros(self.length, dims.dim)}

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x * (1 + rows("multiplicative", weights["table"], pos)).to(x.dtype)
