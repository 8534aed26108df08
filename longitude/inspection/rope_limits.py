"""What is known of how far a rotation reaches: formulas of its frequencies and the trained window.

Liu et al. 2023, "Scaling Laws of RoPE-based Extrapolation" (arXiv:2310.05209). Training on T tokens
shows dimensions whose wavelength is at most T a whole turn: the first d_c = 2⌈(d/2)·log_b(T/2π)⌉ of
d. Beyond the wavelength of the last of them, T_limit = 2π·β^(d_c/d) under a base β, positions meet
angles that were never trained. Tuned at T' tokens, that is worth more than T' only from the
critical base on, β_0 = b^(log(T'/2π) / log(T/2π)). The paper's 10,000 is b here.

Men et al. 2024, "Base of RoPE Bounds Context Length" (arXiv:2405.14591); Su, kexue.fm 10122: that a
key like the query is heard above others, Σ_i cos(m θ_i) >= 0 is wanted at every distance m of the
window, and small bases don't give it. The condition comes and goes as the base grows, so the least
one is searched for: in steps of the fourth digit for windows up to 16,384 tokens, the third up to
131,072, the second beyond. Gaps narrower than a step are passed over. Up to 131,072 tokens that
leaves both digits of Su's table as they are; his finer steps found 2.4e7 for 262,144 tokens, 5.8e7
for 524,288 and 6.5e7 for 1,048,576 (it holds at 65,375,000, and 0.002 % off that no more), where
these find 3.3e7, 6.5e7 and 3.5e8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

LIMIT = 0.6165  # kexue.fm 10122: for many dimensions the condition fails below L / 0.6165
LONGEST = 1 << 21  # windows past this are not searched
DIGITS = ((1 << 14, 4), (1 << 17, 3), (LONGEST, 2))
BATCH, KEPT, STRIDES = 64, 48, (64, 8, 1)


def critical_dimension(dim: int, base: float, trained: float) -> int:
    """How many of a head's rotary dimensions saw a whole turn in training."""
    turned = dim / 2 * math.log(trained / (2 * math.pi)) / math.log(base)
    return min(dim, max(0, 2 * math.ceil(turned)))


def extrapolation_limit(base: float, dim: int, critical: int) -> float:
    """The tokens up to which no dimension meets an angle that it was not trained on."""
    return 2 * math.pi * base ** (critical / dim)


def critical_base(base: float, trained: float, target: float) -> float:
    """The base above which tuning at a target length carries beyond it."""
    return base ** (math.log(target / (2 * math.pi)) / math.log(trained / (2 * math.pi)))


def turns_against(inv_freq: Float[Tensor, " pairs"], still: int, length: int) -> int | None:
    """The first distance at which Σ cos(m θ_i) is below 0; None where there is none in the window.

    `still` pairs of a head that don't turn count 1 each.
    """
    below = (sums(inv_freq.double(), length) + still < 0).nonzero()
    return int(below[0]) if len(below) else None


@lru_cache(maxsize=256)
def least_base(length: int, dim: int) -> float | None:
    """The least base with Σ cos(m θ_i) >= 0 at every distance m of a window; None past LONGEST."""
    if not 2 <= length <= LONGEST or dim < 4:
        return None
    power = torch.arange(dim // 2, dtype=torch.float64) * 2 / dim
    digits = next(each for longest, each in DIGITS if length <= longest)
    bases = _steps(max(2.0, length / LIMIT), digits)
    against = torch.zeros(0, dtype=torch.float64)  # distances that spoke against bases so far
    while True:
        some = torch.tensor([next(bases) for _ in range(BATCH)], dtype=torch.float64)
        theta = some[:, None] ** -power
        heard = (torch.cos(against[:, None] * theta[:, None]).sum(-1) >= 0).all(-1)
        for n in heard.nonzero()[:, 0].tolist():
            if (torch.cos(against[: KEPT // 3, None] * theta[n]).sum(-1) < 0).any():
                continue  # by one that came up since
            worst = _worst(theta[n], length)
            if worst is None:
                return some[n].item()
            against = torch.cat([worst, against])[:KEPT]


def sums(theta: Float[Tensor, " pairs"], length: int, step: int = 1) -> Float[Tensor, " distances"]:
    """Σ_i cos(m θ_i) at m = 0, step, 2 step, … below the length.

    With m = a w + b, cos(m θ) is the real part of a product of a's and b's own: as many sines as
    the square root of the distances, and one multiplication of matrices.
    """
    count = -(-length // step)
    wide = math.isqrt(count - 1) + 1
    coarse, fine = (
        torch.arange(wide, dtype=torch.float64)[:, None] * theta * by for by in (wide * step, step)
    )
    both = coarse.cos() @ fine.cos().mT - coarse.sin() @ fine.sin().mT
    return both.flatten()[:count]


def _worst(theta: Tensor, length: int) -> Tensor | None:
    """The distance that speaks most against these frequencies: of few, of more, or else of all."""
    for step in STRIDES:
        found = sums(theta, length, step)
        if found.min() < 0:
            return found.argmin()[None].double() * step
    return None


def _steps(least: float, digits: int) -> Iterator[float]:
    """Numbers of so many digits, from a least one upwards."""
    fine = 10 ** (digits - 1)
    power = math.floor(math.log10(least))
    at = math.ceil(least / 10**power * fine)
    while True:
        yield at * 10.0**power / fine
        power, at = (power + 1, fine) if at == 10 * fine - 1 else (power, at + 1)
