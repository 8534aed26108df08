"""RoPE: rotary position embedding, in both pair layouts, and xPos's decay.

Pair t of a vector at position m is rotated by the angle m θ_t, so q·k depends on m - n alone (Su et
al. 2021, arXiv:2104.09864). Layout "half" pairs dimension i with i + d/2 (GPT-NeoX, Llama in
transformers); "adjacent" pairs 2i with 2i + 1 (RoFormer, GPT-J, Meta's Llama weights). The two give
equal scores only after permuting the weights' rows. Dimensions beyond the tables' width are not
rotated (partial rotary). Layout "polar" is PoPE (Gopalakrishnan et al. 2025, arXiv:2509.10534):
each channel becomes a pair with magnitude softplus(x) and a learned phase, so that content is in
the magnitudes and position in the angles. Site ③.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from longitude.core.lengths import Lengths, Setting, combinations, rounded
from longitude.core.part import (
    Axes,
    Choice,
    Decay,
    Dims,
    Frequencies,
    HasWeights,
    PerPair,
    Pos,
    QueryRows,
    Region,
    Remap,
    Weights,
    by_rows,
    part,
    train_defaults,
)
from longitude.core.validate import PositiveFloat, UserError
from longitude.parts.frequencies import Unscaled

Pairs = Literal["half", "adjacent", "polar"]


def apply_rotary(
    x: Float[Tensor, "b h n d"],
    cos: Float[Tensor, "#b #h n pairs"],
    sin: Float[Tensor, "#b #h n pairs"],
    pairs: Pairs = "half",
) -> Float[Tensor, "b h n d"]:
    """Rotate x by the tables, in their dtype (float32 or wider), and round once to x's dtype."""
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :width], cos, sin, pairs), x[..., width:]], -1)
    rotate = _rotate_adjacent if pairs == "adjacent" else _rotate_half
    return rotate(x.to(cos.dtype), cos, sin).to(x.dtype)


def _rotate_adjacent(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # it fuses real arithmetic but falls back for complex
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    x = x.contiguous()
    if x.storage_offset() % 2:  # a complex number starts at an even offset
        x = x.clone()
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or cos.requires_grad:  # learned frequencies need gradients
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return _RotateHalf.apply(x, cos, sin)  # type: ignore[return-value]


class _RotateHalf(torch.autograd.Function):
    """Rotate half pairs in x's own layout, without a copy that swaps the halves. The backward pass
    rotates by -sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        rotated = x * torch.cat([cos, cos], -1)
        (a, b), (first, second) = x.chunk(2, -1), rotated.chunk(2, -1)
        first.addcmul_(b, sin, value=-1)
        second.addcmul_(a, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _RotateHalf.apply(grads[0], cos, -sin), None, None


def polar_pairs(q: Tensor, k: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return PoPE's queries and keys, twice as wide, to be rotated in layout "half".

    score = Σ_c softplus(q_c) softplus(k_c) cos((m - n) θ_c - δ_c), θ_c = b^(-c/d), δ_c in [-2π, 0]:
    the rotation of 2 d dimensions, whose pair c is (c, c + d). Queries carry the phase -δ, so that
    heads may share keys.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    angle = delta.to(q.device, wide).clamp(-2 * math.pi, 0)[:, None]
    q_size, k_size = softplus(q.to(wide)), softplus(k.to(wide))
    q = torch.cat([q_size * angle.cos(), -q_size * angle.sin()], -1).to(q.dtype)
    return q, torch.cat([k_size, torch.zeros_like(k_size)], -1).to(k.dtype)


@part("rope", site="rotary", paper="Su et al. 2021, arXiv:2104.09864")
class Rope(HasWeights):
    """RoPE: pair t of a vector at position m is rotated by m θ_t, so q·k depends on m - n alone.

    Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding". `frequencies`
    gives each pair's angle per position, `remap` the positions used, `decay` whether pairs fade
    with distance (xPos), `axes` which of several positions of a token each pair rotates by.
    `rotary_tables` computes the cosines and sines, accurate at any position.
    """

    base: PositiveFloat = 10000
    fraction: float = 1
    pairs: Pairs = "half"
    frequencies: Frequencies = Unscaled()
    remap: Remap | None = None
    decay: Decay | None = None
    axes: Axes | None = None

    def check(self) -> None:
        if self.base <= 1:
            raise UserError(f"rope: base must be above 1, but got {self.base}: 10000 is usual.")
        if not 0 < self.fraction <= 1:
            raise UserError(
                f"rope: fraction must lie in (0, 1], but got {self.fraction}: 0.25 rotates a "
                f"quarter of each head."
            )
        if self.pairs == "polar" and self.fraction != 1:
            raise UserError(
                f"rope: polar pairs take all channels of a head, but got fraction="
                f"{self.fraction}: leave it out."
            )
        if self.axes is not None and self.pairs == "polar":
            raise UserError(f"rope: polar pairs have one position, but got {self.axes}: keep one.")
        rate = self.frequencies
        by_text = self.remap or self.decay or (rate if rate.by_length or by_rows(rate) else None)
        if by_text is not None and self.axes is not None and not self.axes.temporal:
            raise UserError(
                f"rope: {by_text} needs tokens in sequence, but {self.axes} has no order of "
                f"tokens: leave it out, or use fixed frequencies such as linear(2)."
            )

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        """Fresh phases of each head and channel if pairs are polar, or frequencies of learned axes;
        nothing else is learned."""
        if self.axes is not None and not self.axes.temporal:  # temporal axes are never learned
            return self.axes.weights(dims, self.dim(dims.head_dim), self.base, rng)
        polar = self.pairs == "polar"
        return {"delta": torch.zeros(dims.heads, dims.head_dim)} if polar else {}

    def inv_freq(self, dim: int, length: int, frequencies: Frequencies | None = None) -> PerPair:
        """The angle of each pair per step of a position shared by all axes; for learned axes, the
        value before training."""
        frequencies = frequencies or self.frequencies
        if self.axes is None or self.axes.temporal:
            return frequencies.inv_freq(dim, self.base, length)
        return self.axes.inv_freq(frequencies, dim, self.base, length, {}).sum(0)[0]

    def dim(self, head_dim: int) -> int:
        """The rotary dimensions of a head."""
        dim = 2 * head_dim if self.pairs == "polar" else int(head_dim * self.fraction)
        if dim % 2 or not dim:
            raise UserError(
                f"rope: {self.fraction} of a head of {head_dim} is {dim} rotary dimensions, "
                f"which can't be paired: "
                f"choose a fraction or a head size that makes an even number."
            )
        if self.axes is not None:
            self.axes.check_dim(dim)
        return dim

    def query_rows(self, pos: Pos) -> QueryRows | None:
        """The rows that `regions` needs for queries at these positions, None if it needs none."""
        samples = [p.sample(pos) for p in (self.frequencies, self.remap) if by_rows(p)]
        if len(samples) == 2 and not isinstance(pos, range):
            return tuple(sorted({*samples[0], *samples[1]}))
        return samples[0] if samples else None

    def regions(self, rows: QueryRows | None = None) -> tuple[Region, ...]:
        """Disjoint regions that contain queries at these positions: those of the remap, divided
        where it or the frequencies change with the query's position (None: the first band)."""
        regions = self.remap.regions() if self.remap else (Region(),)
        if by_rows(self.remap):
            bands = self.remap.bands(rows or range(1))
            parts = [replace(r, where=r.where & band) for band, of_band in bands for r in of_band]
            regions = tuple(r for r in parts if not r.where.empty)
        if not by_rows(self.frequencies):
            return regions
        parts = [
            Region(r.where & band, r.q, r.k, frequencies)
            for band, frequencies in self.frequencies.bands(rows or range(1))
            for r in regions
        ]
        return tuple(r for r in parts if not r.where.empty)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(), cls(pairs="polar")]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        """Other bases, if frequencies and positions are unchanged."""
        if self.frequencies != Unscaled() or self.remap is not None:
            return ()
        steps = (0.5, 0.75, 1.5, 2, lengths.ratio, 2 * lengths.ratio)
        return combinations(base=[rounded(self.base * by) for by in steps])


@part("xpos", site="decay", paper="Sun et al. 2022, arXiv:2212.10554")
class Xpos(Decay):
    """xPos: RoPE whose pairs also decay with distance, score of pair i × ζ_i^((i-j)/σ).

    Sun et al. 2022, "A Length-Extrapolatable Transformer". ζ_i = (2i/d + γ)/(1 + γ), γ = 0.4, σ =
    512. As a gain ζ^(m/σ) on q and ζ^(-n/σ) on k it would overflow far from 0, so it is centred on
    the queries of the call, which needs pre-RoPE keys and changes no score. Causal only: towards
    the future the gain grows without bound.
    """

    gamma: PositiveFloat = 0.4
    scale_base: PositiveFloat = 512

    def rate(self, dim: int) -> PerPair:
        """ln ζ_i / σ: the logarithm of each pair's gain for one step of distance."""
        zeta = (torch.arange(0, dim, 2, dtype=torch.float64) / dim + self.gamma) / (1 + self.gamma)
        return zeta.log() / self.scale_base

    def span(self, dim: int) -> float:
        """The distance over which the fastest decay covers half of float32's range of exponents."""
        return math.log(2) * 64 / -float(self.rate(dim).min())

    training = train_defaults
