"""Absolute positions, added to the embeddings: functions of position, and learned tables.

Sinusoidal (Vaswani et al. 2017, arXiv:1706.03762) and FLOATER (Liu et al. 2020, arXiv:2003.09229),
the solution of a learned differential equation, have a vector for any position. A table has a row
for each (Gehring et al. 2017, arXiv:1705.03122; BERT, GPT-2). It is extended hierarchically, n rows
to n² positions (Su 2020), tiled (Beltagy et al. 2020), or interpolated (Zhu et al. 2024).
Site ②; `multiplicative` multiplies the table into the embeddings instead.
"""

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor

from longitude.core.lengths import Lengths, Setting, combinations
from longitude.core.part import (
    Choice,
    Dims,
    Embed,
    TokenPositions,
    Vectors,
    Weights,
    part,
    train_defaults,
)
from longitude.core.validate import NonNegativeInt, PositiveFloat, PositiveInt, UserError

Layout = Literal["interleaved", "concatenated"]
Spacing = Literal["paper", "endpoint"]


def sinusoid(
    pos: Tensor, dim: int, base: float, layout: Layout, spacing: Spacing = "paper"
) -> Tensor:
    """Sines and cosines of float64 angles, shape (*pos, dim)."""
    if dim % 2:
        raise UserError(
            f"sinusoidal: the dimension must be even, but got {dim}: sines and cosines come in "
            f"pairs."
        )
    steps = dim / 2 if spacing == "paper" else max(dim // 2 - 1, 1)
    omega = float(base) ** (-torch.arange(dim // 2, dtype=torch.float64, device=pos.device) / steps)
    angle = pos.to(torch.float64)[..., None] * omega
    both = (angle.sin(), angle.cos())
    return torch.stack(both, -1).flatten(-2) if layout == "interleaved" else torch.cat(both, -1)


@part("sinusoidal", site="embed", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Sinusoidal(Embed):
    """Sinusoidal positions: PE(p, 2i) = sin(p ω_i), PE(p, 2i+1) = cos(p ω_i), ω_i = base^(-2i/d).

    Vaswani et al. 2017. Two layouts and two spacings are in use and are not interchangeable: the
    paper interleaves sin and cos and spaces by 2i/d ("paper"); tensor2tensor, fairseq and Whisper
    put all sines before all cosines and space by i/(d/2 - 1) ("endpoint", the last wavelength is
    exactly 2π·base); transformers' Marian and Pegasus do the former but keep the paper's spacing.
    PE(p + k) is a linear map of PE(p); PE(p)·PE(r) depends on |p - r| only, so it does not
    encode direction.
    """

    base: PositiveFloat = 10000
    layout: Layout = "interleaved"
    spacing: Spacing = "paper"

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors:
        return x + sinusoid(pos, x.shape[-1], self.base, self.layout, self.spacing).to(x.dtype)

    training = train_defaults


@part("floater", site="embed", paper="Liu et al. 2020, arXiv:2003.09229")
class Floater(Embed):
    """FLOATER: positions as the path of a flow, dp/dt = h(p, t), evaluated at t = 0, 1, 2, …

    Liu et al. 2020, "Learning to Encode Position for Transformer with Continuous Dynamical Model".
    h is a small network on (p, t); the path starts at a learned p(0) and is solved by fourth-order
    Runge-Kutta with a fixed step, always from position 0, so a position's vector never depends
    on which others are needed. Only the flow at the input is implemented; the paper's other flows,
    biases on q, k and v in every layer, are not.
    """

    hidden: PositiveInt = 64
    steps: PositiveInt = 1
    """Solver steps between two neighbouring positions."""

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng) * shape[0] ** -0.5

        return {
            "start": torch.randn(dims.dim, generator=rng) * 0.02,
            "inward": draw(dims.dim + 1, self.hidden),
            "inward_bias": torch.zeros(self.hidden),
            "outward": draw(self.hidden, dims.dim) * 0.1,
            "outward_bias": torch.zeros(dims.dim),
        }

    def path(self, length: int, weights: Weights) -> Tensor:
        """p(0), …, p(length - 1)."""
        dt, p, points = 1 / self.steps, weights["start"], [weights["start"]]

        def flow(p: Tensor, t: float) -> Tensor:
            hidden = torch.cat([p, p.new_tensor([t])]) @ weights["inward"] + weights["inward_bias"]
            return hidden.tanh() @ weights["outward"] + weights["outward_bias"]

        for step in range((length - 1) * self.steps):
            t = step * dt
            k1 = flow(p, t)
            k2 = flow(p + dt / 2 * k1, t + dt / 2)
            k3 = flow(p + dt / 2 * k2, t + dt / 2)
            p = p + dt / 6 * (k1 + 2 * k2 + 2 * k3 + flow(p + dt * k3, t + dt))
            if (step + 1) % self.steps == 0:
                points.append(p)
        return torch.stack(points)

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors:
        if pos.is_floating_point() or (pos.numel() and pos.min() < 0):
            raise UserError(
                "floater: the flow is read off at integer positions from 0 on: give such positions."
            )
        length = int(pos.max()) + 1 if pos.numel() else 1
        return x + self.path(length, weights)[pos].to(x.dtype)

    training = train_defaults


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
    """Return the table's rows at these positions; raise for positions without a row."""
    if pos.is_floating_point():
        raise UserError(
            f"{name}: a table has no row for real-valued positions: use sinusoidal() or rope()."
        )
    length = table.shape[0] - offset
    if pos.numel() and not torch.compiler.is_compiling():
        low, high = torch.aminmax(pos)
        if low < 0 or high >= length:
            longer = f"a table can be extended to {length**2} positions with hierarchical({length})"
            raise UserError(
                f"{name}: position {int(high if high >= length else low)} is outside the table of "
                f"{length} positions: {longer if name == 'learned' else 'keep to those'}."
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
