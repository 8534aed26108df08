"""How far a rotation reaches, by formulas from its frequencies and the trained window.

Liu et al. 2023, "Scaling Laws of RoPE-based Extrapolation" (arXiv:2310.05209). Training on T tokens
shows one full rotation to dimensions whose wavelength is at most T: the critical dimension
d_c = 2⌈(d/2)·log_b(T/2π)⌉ of d. Beyond the wavelength of the last of them, T_limit = 2π·β^(d_c/d)
under a base β, positions meet untrained angles. Tuning at T' tokens extrapolates past T' only above
the critical base β_0 = b^(log(T'/2π) / log(T/2π)). The paper's 10,000 is b here.

Men et al. 2024, "Base of RoPE Bounds Context Length" (arXiv:2405.14591); Su, kexue.fm 10122: for a
key like the query to score above others, Σ_i cos(m θ_i) >= 0 must hold at every distance m of the
window, which small bases violate. The condition isn't monotonic in the base, so the smallest base
is searched for: in steps of the fourth digit for windows up to 16,384 tokens, the third up to
131,072, the second beyond. Up to 131,072 tokens that gives both digits of Su's table; his finer
steps gave 2.4e7 for 262,144 tokens, 5.8e7 for 524,288 and 6.5e7 for 1,048,576 (it holds at
65,375,000 but not 0.002 % away), where this search gives 3.3e7, 6.5e7 and 3.5e8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.encodings import Encoding
from longitude.inspection.catalogue import MAX_LENGTH, distinct_layers
from longitude.parts import Linear, Ntk, Rope
from longitude.parts.frequencies import stretched

LOWER_BOUND = 0.6165  # kexue.fm 10122: for many dimensions the condition fails below L / 0.6165
MAX_SEARCHED = 1 << 21  # tokens: the longest window whose smallest base is searched for
DIGITS = ((1 << 14, 4), (1 << 17, 3), (MAX_SEARCHED, 2))
BATCH, REMEMBERED, STRIDES = 64, 48, (64, 8, 1)


@dataclass(frozen=True)
class RopeLimits:
    """How far a rotation reaches; field names are JSON keys."""

    base: float
    dim: int  # rotary dimensions of a head
    trained: int  # tokens: the window, or the original one before scaling
    longest: float  # wavelength, in tokens
    unfinished: int  # pairs that don't complete one rotation within the window
    critical_dimension: int
    limit: float  # T_limit
    least_base: float | None  # for the window
    against: int | None  # the first distance of the window at which Σ cos is below 0
    target: int | None = None
    critical_base: float | None = None
    target_least_base: float | None = None


def main_rope(encoding: Encoding) -> Rope | None:
    """The rotation of the layers that see farthest; None if there is none with a written form."""
    if encoding.kind != "rope" or encoding.scheme is None or not encoding.head_dim:
        return None
    rotary = [s for s in distinct_layers(parse(encoding.scheme)) if s.rotary]
    best = max(rotary, key=lambda s: len(s.mask) == 1, default=None)  # no window: sees everything
    return best.rotary if best else None


def rope_limits(encoding: Encoding, target: int | None = None) -> RopeLimits | None:
    """The limits of a model's rotation in its window; None if it has none, or names no window."""
    rope, window, head = main_rope(encoding), encoding.window, encoding.head_dim
    if rope is None or not window or not head or window > MAX_LENGTH:
        return None
    try:
        dim = rope.dim(head)
        inv_freq = rope.inv_freq(dim, window)
    except UserError:  # a head size that differs by layer, or lists of another length
        return None
    trained, frequencies = encoding.original or window, rope.frequencies
    # linear(…) divides positions, so the window looks shorter; ntk(…) is a larger base
    shrunk = frequencies.factor if isinstance(frequencies, Linear) else 1.0
    ntk = frequencies.factor if isinstance(frequencies, Ntk) else 1.0
    base = stretched(rope.base, ntk, dim) if ntk != 1 else float(rope.base)
    waves = [2 * math.pi / f if f else math.inf for f in inv_freq.tolist()]
    critical = critical_dimension(dim, base, trained / shrunk)
    tuned = target is not None and trained > 2 * math.pi
    return RopeLimits(
        base=base,
        dim=dim,
        trained=trained,
        longest=max((w for w in waves if math.isfinite(w)), default=0.0),
        unfinished=sum(w > window for w in waves),
        critical_dimension=critical,
        limit=shrunk * extrapolation_limit(base, dim, critical),
        least_base=least_base(math.ceil(window / shrunk), dim) if dim == head else None,
        against=first_negative(inv_freq, (head - dim) // 2, min(window, MAX_SEARCHED)),
        target=target,
        critical_base=critical_base(base, trained, target) if tuned and target else None,
        target_least_base=least_base(target, dim) if target and dim == head else None,
    )


def critical_dimension(dim: int, base: float, trained: float) -> int:
    """How many of a head's rotary dimensions completed one rotation in training."""
    pairs = dim / 2 * math.log(trained / (2 * math.pi)) / math.log(base)
    return min(dim, max(0, 2 * math.ceil(pairs)))


def extrapolation_limit(base: float, dim: int, critical: int) -> float:
    """The tokens up to which no dimension meets an untrained angle."""
    return 2 * math.pi * base ** (critical / dim)


def critical_base(base: float, trained: float, target: float) -> float:
    """The base above which tuning at a target length extrapolates past it."""
    return base ** (math.log(target / (2 * math.pi)) / math.log(trained / (2 * math.pi)))


def first_negative(inv_freq: Float[Tensor, " pairs"], unrotated: int, length: int) -> int | None:
    """The first distance at which Σ cos(m θ_i) < 0, if any; `unrotated` pairs count 1 each."""
    below = (cosine_sums(inv_freq.double(), length) + unrotated < 0).nonzero()
    return int(below[0]) if len(below) else None


@lru_cache(maxsize=256)
def least_base(length: int, dim: int) -> float | None:
    """The smallest base with Σ cos(m θ_i) >= 0 at every distance of a window, if searched for."""
    if not 2 <= length <= MAX_SEARCHED or dim < 4:
        return None
    power = torch.arange(dim // 2, dtype=torch.float64) * 2 / dim
    digits = next(each for longest, each in DIGITS if length <= longest)
    bases = _rounded_up(max(2.0, length / LOWER_BOUND), digits)
    negative = torch.zeros(0, dtype=torch.float64)  # distances at which earlier bases failed
    while True:
        batch = torch.tensor([next(bases) for _ in range(BATCH)], dtype=torch.float64)
        theta = batch[:, None] ** -power
        passed = (torch.cos(negative[:, None] * theta[:, None]).sum(-1) >= 0).all(-1)
        for n in passed.nonzero()[:, 0].tolist():
            if (torch.cos(negative[: REMEMBERED // 3, None] * theta[n]).sum(-1) < 0).any():
                continue  # at a distance found earlier in this batch
            for step in STRIDES:  # the most negative sum of few distances, of more, or of all
                sums = cosine_sums(theta[n], length, step)
                if sums.min() < 0:
                    worst = sums.argmin()[None].double() * step
                    negative = torch.cat([worst, negative])[:REMEMBERED]
                    break
            else:
                return batch[n].item()


def cosine_sums(
    theta: Float[Tensor, " pairs"], length: int, step: int = 1
) -> Float[Tensor, " distances"]:
    """Σ_i cos(m θ_i) at m = 0, step, 2 step, … below the length. With m = a w + b, cos(m θ) is the
    real part of a product of factors in a and in b: √length sines and one matrix product."""
    count = -(-length // step)
    width = math.isqrt(count - 1) + 1
    coarse, fine = (
        torch.arange(width, dtype=torch.float64)[:, None] * theta * by
        for by in (width * step, step)
    )
    sums = coarse.cos() @ fine.cos().mT - coarse.sin() @ fine.sin().mT
    return sums.flatten()[:count]


def _rounded_up(start: float, digits: int) -> Iterator[float]:
    """Yield the numbers with this many significant digits, from `start` upwards."""
    fine = 10 ** (digits - 1)
    power = math.floor(math.log10(start))
    mantissa = math.ceil(start / 10**power * fine)
    while True:
        yield mantissa * 10.0**power / fine
        power, mantissa = (power + 1, fine) if mantissa == 10 * fine - 1 else (power, mantissa + 1)
