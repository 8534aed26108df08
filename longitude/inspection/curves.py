"""What a scheme does with distance: how far the rotation thinks each key is, and what that does.

Every function samples: a few hundred rows, whatever the length, each exact at its own distance.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longitude.core.part import Pos, Region
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.inspection.rows import DecayRow, DistanceRow, Grid, WavelengthRow
from longitude.parts import Rope, Sequential
from longitude.parts.frequencies import Unscaled

ROWS = 128  # evenly spaced, and as many again in equal ratios
WITHIN = 256  # points between two rows of a curve that swings faster than the rows are apart
GRID = 40  # tokens on each side of a picture of pairs
SAME = 0.01  # a wavelength within this share of another counts as equal to it


def sample(count: int, even: bool = True) -> list[int]:
    """Whole numbers below count, in equal ratios and, where asked for, evenly spaced too: all of
    them while they are few."""
    return list(_sample(count, even))


@lru_cache(maxsize=64)
def _sample(count: int, even: bool) -> tuple[int, ...]:
    if count <= ROWS:
        return tuple(range(count))
    last = count - 1
    ratio = {round(last ** (s / ROWS)) for s in range(ROWS + 1)}
    evenly = {round(last * s / ROWS) for s in range(ROWS + 1)} if even else set()
    return tuple(sorted({0} | ratio | evenly))


def positions(scheme: Scheme, length: int, tokens: Tensor) -> Tensor:
    """Where the position policy of a scheme puts these tokens of a sequence at test time."""
    ids: Pos = scheme.positions.ids(length)
    return tokens * ids.step + ids.start if isinstance(ids, range) else ids[tokens]


def believed(scheme: Scheme, i: Tensor, j: Tensor) -> Tensor:
    """The distance that the rotation is told for query and key positions; nan where hidden."""
    remap = scheme.rotary.remap if scheme.rotary else None
    told = torch.full(torch.broadcast_shapes(i.shape, j.shape), torch.nan, dtype=torch.float64)
    for region in remap.regions() if remap else (Region(),):
        told = torch.where(region.where.visible(i, j), region.q(i) - region.k(j), told)
    return told.where(visible(scheme.areas(), i, j), torch.nan)


def distances(scheme: Scheme, length: int) -> tuple[DistanceRow, ...]:
    """The distance map of the last query, where a remap or a position policy makes it one."""
    remapped = scheme.rotary is not None and scheme.rotary.remap is not None
    if not remapped and scheme.positions == Sequential():
        return ()
    r = torch.tensor(sample(length))
    told = _told(scheme, length, r)
    return tuple(DistanceRow(a, number(b)) for a, b in zip(r.tolist(), told.tolist(), strict=True))


def decay(scheme: Scheme, length: int, head_dim: int) -> tuple[DecayRow, ...]:
    """The mean over rotary pairs of cos(distance × frequency), with the decay of xPos, for the last
    query."""
    if scheme.rotary is None:
        return ()
    edges, r, swing = swings(scheme, scheme.rotary, length, head_dim)
    dim, base = scheme.rotary.dim(head_dim), scheme.rotary.base
    plain = _mean_cos(r, Unscaled().inv_freq(dim, base, length)).where(r >= 0, torch.nan)
    columns = [c.tolist() for c in (swing.nanmean(1), *ends(swing), plain.nanmean(1))]
    return tuple(
        DecayRow(edge, number(mean), number(low), number(high), usual)
        for edge, mean, low, high, usual in zip(edges, *columns, strict=True)
    )


def swings(
    scheme: Scheme, rope: Rope, length: int, head_dim: int, within: int = WITHIN
) -> tuple[list[int], Tensor, Tensor]:
    """The distances at which rows start, `within` distances of each row, and the mean cosine there;
    nan where hidden or not a distance."""
    edges, r = sample(length, even=False), _rows(length, within)
    return edges, r, _waves(scheme, rope, length, head_dim, r)


@lru_cache(maxsize=16)
def _rows(length: int, within: int) -> Tensor:
    """The distances of each row of a decay curve."""
    edges = [*sample(length, even=False), length]
    return torch.tensor([_between(a, b, within) for a, b in pairwise(edges)])


def wavelengths(scheme: Scheme, length: int, head_dim: int) -> tuple[WavelengthRow, ...]:
    """Each rotary pair's wavelength, plain and scaled, and what became of it."""
    rope = scheme.rotary
    if rope is None:
        return ()
    dim = rope.dim(head_dim)
    plain = 2 * math.pi / Unscaled().inv_freq(dim, rope.base, length)
    scaled = 2 * math.pi / rope.frequencies.inv_freq(dim, rope.base, length)
    stretch = (scaled / plain).tolist()
    most = max((s for s in stretch if math.isfinite(s)), default=1.0)
    return tuple(
        WavelengthRow(pair, p, number(s), _state(by, most))
        for pair, (p, s, by) in enumerate(
            zip(plain.tolist(), scaled.tolist(), stretch, strict=True)
        )
    )


def grid(scheme: Scheme, length: int) -> Grid:
    """Which pairs are visible, and how far apart they are believed, for tokens spread evenly."""
    count = min(GRID, length)
    tokens = [round(s * (length - 1) / max(count - 1, 1)) for s in range(count)]
    p = positions(scheme, length, torch.tensor(tokens))
    told = believed(scheme, p[:, None], p[None, :]).tolist()
    return Grid(tuple(tokens), tuple(tuple(number(v) for v in line) for line in told))


def number(value: float) -> float | None:
    """A float for JSON, which has neither nan nor infinity."""
    return value if math.isfinite(value) else None


def _told(scheme: Scheme, length: int, r: Tensor) -> Tensor:
    """What the last query believes of the keys r tokens before it."""
    last = positions(scheme, length, torch.tensor(length - 1))
    return believed(scheme, last, positions(scheme, length, length - 1 - r))


def _between(start: int, stop: int, most: int) -> list[int]:
    """Points from start up to stop, filled up with -1."""
    count = min(stop - start, most)
    return [start + s * (stop - start) // count for s in range(count)] + [-1] * (most - count)


def _waves(scheme: Scheme, rope: Rope, length: int, head_dim: int, r: Tensor) -> Tensor:
    """The mean over pairs at distances r; nan where hidden or not a distance."""
    dim = rope.dim(head_dim)
    told = _told(scheme, length, r.clamp(min=0)).where(r >= 0, torch.nan)
    fade = rope.decay.rate(dim) if rope.decay else None
    return _mean_cos(told, rope.frequencies.inv_freq(dim, rope.base, length), fade)


def _mean_cos(r: Tensor, theta: Tensor, fade: Tensor | None = None) -> Tensor:
    waves = torch.cos(r[..., None] * theta)
    return (waves if fade is None else waves * torch.exp(r[..., None] * fade)).mean(-1)


def ends(swing: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest number of each row; infinite where there is none."""
    inf = torch.inf
    return swing.nan_to_num(nan=inf).amin(1), swing.nan_to_num(nan=-inf).amax(1)


def _state(stretch: float, most: float) -> str:
    """What became of a pair whose wavelength grew by `stretch`, where the most that any grew is
    `most`."""
    if not math.isfinite(stretch):
        return "still"
    if abs(stretch - 1) < SAME:
        return "kept"
    if stretch < 1:
        return "shortened"
    return "interpolated" if stretch > most * (1 - SAME) else "mixed"
