"""Other spectra: frequencies rounded, cut off or reshaped, most of them for training.

Resonance RoPE (Wang et al. 2024) rounds wavelengths to whole positions, on top of any fixed
scaling. Giraffe's truncated and power bases (Pal et al. 2023), HoPE (Chen et al. 2025) and the
first half of FoPE (Hua et al. 2025) slow down or stop the pairs that never finish a turn in the
trained window. Site ③, inside `rope(frequencies=…)`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import float64

from longitude.core.lengths import Lengths, Setting
from longitude.core.part import (
    Choice,
    Frequencies,
    PerPair,
    by_rows,
    optional,
    part,
    train_defaults,
)
from longitude.core.validate import PositiveFloat, PositiveInt, UserError
from longitude.parts.frequencies import Unscaled, Yarn, powers


@part("resonance", site="frequencies", paper="Wang et al. 2024, arXiv:2403.00071")
class Resonance(Frequencies):
    """Resonance RoPE: every wavelength rounded to a whole number of positions, 2π/round(2π/θ_i).

    Wang et al. 2024, "Resonance RoPE: Improving Context Length Generalization of Large Language
    Models". Pairs that finish a turn in the window then repeat exactly, so they meet no angle that
    they were not trained on. `of` are the frequencies that are rounded, after their own scaling.
    With base 10,000 and 128 dimensions wavelengths become 6, 7, 8, 10, 11, 13, …, changes of up to
    4.5 %. Angles need no p mod wavelength here: tables are made in float64.
    """

    of: Frequencies = Unscaled()

    def check(self) -> None:
        if by_rows(self.of) or self.of.by_length:
            raise UserError(
                f"resonance: wavelengths of fixed frequencies are rounded, but got {self.of}: use "
                f"yarn(…) or another scaling with a factor of its own."
            )

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        wavelengths = 2 * math.pi / self.of.inv_freq(dim, base, length)
        return (2 * math.pi / wavelengths.round().clamp(min=1)).to(dtype)

    def gain(self, length: int) -> float:
        return self.of.gain(length)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(Yarn(lengths.factor(), original=lengths.trained))]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return [{"of": replace(self.of, **values)} for values in optional(self.of, "grid", lengths)]  # type: ignore[type-var]

    training = train_defaults


@part("power_basis", site="frequencies", paper="Pal et al. 2023, arXiv:2308.10882")
class PowerBasis(Frequencies):
    """Giraffe's power basis: θ_i · (1 - 2i/d)^k, so that slow pairs rotate slower still.

    Pal et al. 2023, "Giraffe: Adventures in Expanding Context Lengths in LLMs". With k = 1/2 and
    128 dimensions the slowest pair rotates 8 times slower. Needs fine-tuning.
    """

    power: PositiveFloat = 0.5

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        share = 1 - torch.arange(0, dim, 2, dtype=dtype) / dim
        return 1.0 / powers(dim, base, dtype) * share**self.power

    training = train_defaults


@part("truncated_basis", site="frequencies", paper="Pal et al. 2023, arXiv:2308.10882")
class TruncatedBasis(Frequencies):
    """Giraffe's truncated basis: pairs that finish no turn in the window rotate at one slow rate,
    the slowest not at all.

    Pal et al. 2023. With c = 2π/L: θ_i >= c stays, c/8 <= θ_i < c becomes c/16, below that 0, as in
    the released code. Needs fine-tuning; better in perplexity than in retrieval, by its authors.
    """

    length: PositiveInt

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        theta, cut = 1.0 / powers(dim, base, dtype), 2 * math.pi / self.length
        slow = (theta >= cut / 8) * (theta.new_ones(()) * cut / 16)
        return torch.where(theta >= cut, theta, slow)

    @classmethod
    def training(cls, length: int) -> Sequence[Choice]:
        return [cls(length)]


@part(
    "floor_to_zero",
    site="frequencies",
    paper="Hua et al. 2025, arXiv:2412.17739; Chen et al. 2025, arXiv:2410.21216",
)
class FloorToZero(Frequencies):
    """Slow pairs stopped: θ_i below 2π/L becomes 0, so that every pair that rotates has finished a
    turn in training.

    The first half of FoPE (Hua et al. 2025, "Fourier Position Embedding"), and HoPE (Chen et al.
    2025, "HoPE: A Novel Positional Encoding Without Long-Term Decay"), whose own cutoff is not in
    public code: a turn within L is the safe reading. It is `proportional` with the share that
    follows from the length. For models trained with it.
    """

    length: PositiveInt

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        theta = 1.0 / powers(dim, base, dtype)
        return torch.where(theta >= 2 * math.pi / self.length, theta, 0.0)

    @classmethod
    def training(cls, length: int) -> Sequence[Choice]:
        return [cls(length)]
