"""Static RoPE frequencies: the model's own, and the scalings that fix a factor in advance.

RoPE rotates pair i at θ_i = base^(-2i/d), i = 0 … d/2 - 1, d the rotary dimension of one head. Each
part here returns scaled θ_i (`inv_freq`) and a factor on the rotated part of the score (`gain`):
position interpolation, NTK-aware, NTK mixed, NTK-by-parts, YaRN, Llama 3.1, LongRoPE, Gemma 4's
proportional RoPE. Site ③, inside `rope(frequencies=…)`. All keep transformers' order of operations,
so that float32 results are bitwise equal.
"""

import math
from collections.abc import Iterable
from dataclasses import field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, float64

from longitude.core.lengths import Lengths, Setting, combinations, rounded
from longitude.core.part import Choice, Frequencies, PerPair, part
from longitude.core.validate import PositiveFloat, PositiveInt, UserError


def powers(
    dim: int, base: float | Tensor, dtype: torch.dtype = torch.float64, pairs: int | None = None
) -> Tensor:
    """base^(2i/dim), the inverse of unscaled frequencies, for all pairs or the first `pairs`."""
    end = dim if pairs is None else 2 * pairs
    return base ** (torch.arange(0, end, 2, dtype=torch.int64).to(dtype) / dim)


def check_bounds(part: Any, low: str, high: str, usual: str) -> None:
    """Raise if the lower bound is above the upper one; if they are equal, the ramp is a step."""
    a, b = getattr(part, low), getattr(part, high)
    if a > b:
        raise UserError(
            f"{part.name}: {low} must not be above {high}, but got {a} and {b}: {usual} are usual."
        )


@part("unscaled", site="frequencies", paper="Su et al. 2021, arXiv:2104.09864")
class Unscaled(Frequencies):
    """RoPE's own frequencies: θ_i = base^(-2i/d), i = 0 … d/2 - 1, d the rotary dimension of one
    head.

    Su et al. 2021, "RoFormer". The other scalings start from `powers`, which keeps
    transformers' order of operations, so that float32 results are bitwise equal.
    """

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        return 1.0 / powers(dim, base, dtype)


@part("linear", site="frequencies", paper="Chen et al. 2023, arXiv:2306.15595")
class Linear(Frequencies):
    """Position interpolation: every frequency divided by the factor, θ_i / s.

    Chen et al. 2023, "Extending Context Window of Large Language Models via Position
    Interpolation"; kaiokendev. Weak beyond a factor of 2 without fine-tuning.
    """

    factor: PositiveFloat

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        return 1.0 / powers(dim, base, dtype) / self.factor

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor())]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(factor=lengths.factors(self.factor))


def stretched(base: float, factor: float, dim: int) -> float:
    """The base at which the slowest of dim/2 pairs rotates `factor` times slower."""
    if dim <= 2:
        raise UserError(
            f"ntk: a rotary dimension of {dim} has one pair, which can't both stay and stretch: "
            f"use linear()."
        )
    return base * factor ** (dim / (dim - 2))


@part("ntk", site="frequencies", paper="bloc97 2023; Peng et al. 2023, arXiv:2309.00071")
class Ntk(Frequencies):
    """NTK-aware scaling: a larger base, b' = b · s^(d/(d-2)), d the rotary dimension of one head.

    bloc97 2023. The fastest pair keeps its frequency exactly, the slowest is divided by s exactly.
    Set the factor above the ratio of lengths you need: it is reliable to about half the factor
    (kexue.fm 9948).
    """

    factor: PositiveFloat

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        return 1.0 / powers(dim, stretched(base, self.factor, dim), dtype)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor())]

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor(2))]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(factor=lengths.factors(self.factor))


@part("ntk_mixed", site="frequencies", paper="Su 2023, kexue.fm/archives/9706")
class NtkMixed(Frequencies):
    """NTK-RoPE mixed: θ_i · exp(-a (i+1)^p), with a (d/2)^p = ln s.

    Su 2023 (kexue.fm 9706). p = 0 is position interpolation, p = 1 Su's "fixed" NTK; 0.625 was the
    best of the post, 0.75 is what its published patch uses.
    """

    factor: PositiveFloat
    power: float = 0.625

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        a = math.log(self.factor) / (dim / 2) ** self.power
        i = torch.arange(1, dim // 2 + 1, dtype=dtype)
        return 1.0 / powers(dim, base, dtype) * torch.exp(-a * i**self.power)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor())]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        power = (0.5, 0.625, 0.75, 1, self.power)
        return combinations(factor=lengths.factors(self.factor), power=power)


class Ramp(Frequencies, Protocol):
    """A scaling that changes gradually from kept to interpolated pairs, between two bounds."""

    factor: PositiveFloat
    low: float
    high: float

    @classmethod
    def more_candidates(cls: Any, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.factor(), original=lengths.trained)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        low, high = (0.5, 1, 2, self.low), (4, 8, 16, 32, self.high)
        return combinations(factor=lengths.factors(self.factor), low=low, high=high)


@part("by_parts", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class ByParts(Ramp):
    """NTK-by-parts: pairs with many rotations inside the window stay, those with less than one are
    interpolated.

    Peng et al. 2023, section 3.2. r_i = L θ_i / 2π rotations inside the window; γ = clip((r_i -
    low)/(high - low), 0, 1); θ'_i = (1 - γ) θ_i / s + γ θ_i. The ramp is linear in r, unlike YaRN's
    released code (linear in i).
    """

    factor: PositiveFloat
    original: PositiveInt = field(kw_only=True)
    low: float = 1
    high: float = 32

    def check(self) -> None:
        check_bounds(self, "low", "high", "1 and 32")

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        theta = 1.0 / powers(dim, base, dtype)
        rotations = self.original * theta / (2 * math.pi)
        keep = ((rotations - self.low) / max(self.high - self.low, 1e-9)).clamp(0, 1)
        return (1 - keep) * theta / self.factor + keep * theta


def magnitude(factor: float, mscale: float = 1) -> float:
    """0.1 · mscale · ln(factor) + 1 for factors above 1, else 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@part("yarn", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class Yarn(Frequencies):
    """YaRN: NTK-by-parts and a temperature, logits × (0.1 ln s + 1)².

    Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models". The
    released code, all released checkpoints and transformers ramp linearly in the pair's index i
    ("code"); the paper's formula ramps linearly in its rotations r ("paper"), and differs by up to
    a factor of 3 on some pairs. `truncate` rounds the ramp's ends outward. `attention_factor` is
    the factor on q and on k each; `mscale` and `mscale_all_dim` (DeepSeek) give it as a ratio where
    both are set, and `mscale` alone changes nothing, as in transformers.
    """

    factor: PositiveFloat
    original: PositiveInt = field(kw_only=True)
    fast: float = 32
    slow: PositiveFloat = 1
    ramp: Literal["code", "paper"] = "code"
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def check(self) -> None:
        check_bounds(self, "slow", "fast", "1 and 32")

    def bounds(self, dim: int, base: float) -> tuple[float, float]:
        """The pair indices between which the ramp runs."""
        ends = [
            dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (self.fast, self.slow)
        ]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if self.truncate else ends
        return max(low, 0), min(high, dim - 1)

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        if self.ramp == "paper":
            mixed = ByParts(self.factor, original=self.original, low=self.slow, high=self.fast)
            return mixed.inv_freq(dim, base, length, dtype)
        low, high = self.bounds(dim, base)
        width = high - low if high != low else 0.001
        stretch = ((torch.arange(dim // 2, dtype=dtype) - low) / width).clamp(0, 1)
        # transformers' order: 1 - (1 - stretch), and the factor multiplied in before the division
        keep, pos = 1 - stretch, powers(dim, base, dtype)
        return 1.0 / (self.factor * pos) * (1 - keep) + 1.0 / pos * keep

    def attention(self) -> float:
        """The factor on q and on k each."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all_dim)
        return magnitude(self.factor)

    def gain(self, length: int) -> float:
        return self.attention() ** 2

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        """The ratio of the lengths, and twice it: YaRN tends to reach less far than its factor."""
        return [cls(lengths.factor(times), original=lengths.trained) for times in (1, 2)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        logn = rounded(math.sqrt(math.log(lengths.target) / math.log(lengths.trained)))
        return combinations(
            factor=lengths.factors(self.factor),
            fast=(4, 8, 16, 32, 64, self.fast),
            slow=(0.5, 1, 2, self.slow),
            attention_factor=(None, 1, logn, self.attention_factor),
        )


@part("llama3", site="frequencies", paper="Dubey et al. 2024, arXiv:2407.21783")
class Llama3(Ramp):
    """Llama 3.1's scaling: NTK-by-parts with bounds 1 and 4, in wavelengths.

    Dubey et al. 2024, "The Llama 3 Herd of Models", and its released code. Wavelengths above
    original/low are divided by the factor, below original/high kept, between them mixed by
    original/wavelength.
    """

    factor: PositiveFloat
    original: PositiveInt = field(kw_only=True)
    low: PositiveFloat = 1
    high: float = 4

    def check(self) -> None:
        check_bounds(self, "low", "high", "1 and 4")

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        theta = 1.0 / powers(dim, base, dtype)
        wavelength = 2 * math.pi / theta
        longest, shortest = self.original / self.low, self.original / self.high
        slow = torch.where(wavelength > longest, theta / self.factor, theta)
        keep = (self.original / wavelength - self.low) / (self.high - self.low or 1)
        mixed = (1 - keep) * slow / self.factor + keep * slow
        between = (wavelength >= shortest) & (wavelength <= longest)
        return torch.where(between, mixed, slow)


@part("longrope", site="frequencies", paper="Ding et al. 2024, arXiv:2402.13753")
class LongRope(Frequencies):
    """LongRoPE: each frequency divided by its own searched factor, θ_i / λ_i.

    Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens"; Phi-3. Calls
    no longer than `original` take the short factors, longer ones the long factors; the length is an
    input, fixed for the life of a cache. The temperature √(1 + ln s / ln L) on q and on k squares
    to log_L(sL) exactly, which is Su's logn at the target length. The paper's search also leaves
    the first few tokens uninterpolated; checkpoints and transformers don't, and neither does this.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: PositiveInt = field(kw_only=True)
    factor: PositiveFloat = 1
    attention_factor: float | None = None
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        if self.original == 1:
            raise UserError(
                "longrope: original is 1, but the formula divides by its logarithm: give 2 or more."
            )
        if len(self.short) != len(self.long) or not self.short or min(self.short + self.long) <= 0:
            raise UserError(
                f"longrope: short and long must be as many positive factors, but got "
                f"{len(self.short)} and {len(self.long)}: give one for each rotary pair."
            )

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        factors = self.long if length > self.original else self.short
        if len(factors) != dim // 2:
            raise UserError(
                f"longrope: {len(factors)} factors for a rotary dimension of {dim}: give "
                f"{dim // 2}, one for each pair."
            )
        return 1.0 / (torch.tensor(factors, dtype=dtype) * powers(dim, base, dtype))

    def attention(self) -> float:
        """The factor on q and on k each."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(1, self.factor)) / math.log(self.original))

    def gain(self, length: int) -> float:
        return self.attention() ** 2


@part("proportional", site="frequencies", paper="Gemma Team 2026, transformers 5.22 'proportional'")
class Proportional(Frequencies):
    """Proportional RoPE: the first `share` of the pairs rotate, at the frequencies of the full
    head; the rest do not.

    Gemma 4, as transformers computes it. Unlike a `fraction` of the head, the exponent runs over
    the full dimension, so the pairs that rotate are the fastest ones.
    """

    share: float
    factor: PositiveFloat = 1

    def check(self) -> None:
        if not 0 <= self.share <= 1:
            raise UserError(
                f"proportional: share must lie between 0 and 1, but got {self.share}: 0.25 "
                f"rotates a quarter."
            )

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        rotating = int(self.share * dim // 2)
        # no more powers than needed: float32's last bit depends on how many are computed at once
        theta = 1.0 / powers(dim, base, dtype, pairs=rotating)
        return torch.cat([theta, theta.new_zeros(dim // 2 - rotating)]) / self.factor
