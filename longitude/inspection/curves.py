"""What a scheme does with distance, as the rows that `longitude show` draws.

Every curve has a few hundred rows, whatever the length; each row is exact at its distance.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longitude.core.part import Dims, by_rows
from longitude.core.scheme import Layers, Scheme
from longitude.inspection import catalogue, rows
from longitude.inspection.score_variance import (
    SEED,
    ScoreModel,
    positions,
    remapped_distance,
    visible_keys,
)
from longitude.parts import Randomized, Rope, Sequential
from longitude.parts.frequencies import Unscaled

SAMPLES = 128  # evenly spaced, and as many in equal ratios
WITHIN = 256  # points between two rows of a curve that oscillates faster than its rows are spaced
GRID = 40  # tokens on each side of the plot of pairs
HEADS = 4  # heads drawn of each bias
MAX_SPAN = 4096  # distances per call of a bias, which may compute a table of all between them
SAME = 0.01  # relative difference below which two wavelengths count as equal


def page(
    scheme: Scheme | Layers, length: int | None = None, dim: int | None = None, heads: int = 8
) -> rows.Page:
    """The rows of a scheme; without a length or a head size, ones that fit it are chosen."""
    layers = catalogue.distinct_layers(scheme)
    length = max(map(catalogue.default_length, layers)) if length is None else length
    dim = max(map(catalogue.default_dim, layers)) if dim is None else dim
    catalogue.check_sizes(length, dim, heads)
    trained = [n for s in layers if (n := catalogue.named_trained_length(s))]
    dims = Dims(dim=dim * heads, heads=heads, head_dim=dim)
    sheets = tuple(
        rows.Sheet(
            written=str(layer),
            layers=used,
            parts=tuple(map(catalogue.part_row, catalogue.all_parts(layer) or layer.mask)),
            notes=tuple(notes(layer, length, dims)),
            distances=distances(layer, length),
            decay=decay(layer, length, dim),
            wavelengths=wavelengths(layer, length, dim),
            bias=bias(layer, length, dims),
            scale=scale(layer, length, dims),
            visible=grid(layer, length),
        )
        for layer, used in layers.items()
    )
    return rows.Page(str(scheme), length, dim, heads, min(trained, default=None), sheets)


def notes(
    scheme: Scheme, length: int, dims: Dims, contents: str = "shown for one random query and key"
) -> list[str]:
    """Notes on what the plots do not show by themselves."""
    model, lines = ScoreModel(scheme, length, dims), []
    frequencies = scheme.rotary.frequencies if scheme.rotary else None
    if frequencies and (gain := frequencies.gain(length)) != 1:
        lines.append(f"{frequencies} also multiplies the rotary part of every score by {gain:.3f}.")
    if frequencies and frequencies.by_length:
        lines.append(f"{frequencies} depends on the length: shown for {length} tokens.")
    if by_rows(frequencies):
        lines.append(f"{frequencies} depends on the query: shown for the last one.")
    if scheme.positions != Sequential():
        random = isinstance(scheme.positions, Randomized)
        form = "evenly spaced" if random else "with plain positions"
        lines.append(f"{scheme.positions} draws in training: shown {form}, its test-time form.")
    learned = [part for part, weights in model.weights.items() if weights]
    lines += [f"{part} is learned: shown at fresh weights (seed {SEED})." for part in learned]
    if model.bias_reads_content:
        lines.append(f"The bias depends on content: {contents}.")
    return lines


@lru_cache(maxsize=64)
def sample(count: int, even: bool = True) -> tuple[int, ...]:
    """Integers below `count` in equal ratios and, if `even`, evenly spaced too; all if few."""
    if count <= SAMPLES:
        return tuple(range(count))
    last = count - 1
    ratios = {round(last ** (s / SAMPLES)) for s in range(SAMPLES + 1)}
    evenly = {round(last * s / SAMPLES) for s in range(SAMPLES + 1)} if even else set()
    return tuple(sorted({0} | ratios | evenly))


def between(length: int, within: int = WITHIN) -> list[list[int]]:
    """For each of a sample of distances, up to `within` distances evenly spaced to the next."""
    spans = pairwise([*sample(length, even=False), length])
    counts = [(a, b - a, min(b - a, within)) for a, b in spans]
    return [[a + s * span // count for s in range(count)] for a, span, count in counts]


def number(value: float) -> float | None:
    """A float for JSON, which has neither nan nor infinity."""
    return value if math.isfinite(value) else None


# rotation


def distances(scheme: Scheme, length: int) -> tuple[rows.DistanceRow, ...]:
    """The distance map of the last query, if a remap or a position policy changes distances."""
    remapped = scheme.rotary is not None and scheme.rotary.remap is not None
    if not remapped and scheme.positions == Sequential():
        return ()
    r = sample(length)
    remap = from_last(scheme, length, torch.tensor(r)).tolist()
    return tuple(map(rows.DistanceRow, r, map(number, remap)))


def decay(scheme: Scheme, length: int, head_dim: int) -> tuple[rows.DecayRow, ...]:
    """The mean of cos(distance × frequency) over pairs, with xPos's decay, for the last query."""
    if scheme.rotary is None:
        return ()
    edges, r, cosine = mean_cosine(scheme, scheme.rotary, length, head_dim)
    plain = scheme.rotary.inv_freq(scheme.rotary.dim(head_dim), length, Unscaled())
    unscaled = _mean_cos(r, plain).where(r >= 0, torch.nan)
    shown = (map(number, c.tolist()) for c in (cosine.nanmean(1), *extremes(cosine)))
    return tuple(map(rows.DecayRow, edges, *shown, unscaled.nanmean(1).tolist()))


def mean_cosine(
    scheme: Scheme, rope: Rope, length: int, head_dim: int, within: int = WITHIN
) -> tuple[list[int], Tensor, Tensor]:
    """The distances at which rows start; up to `within` distances in each row (-1: none); and the
    mean cosine at these, nan where hidden."""
    lines = between(length, within)
    r = torch.tensor([line + [-1] * (within - len(line)) for line in lines])
    dim = rope.dim(head_dim)
    distance = from_last(scheme, length, r.clamp(min=0)).where(r >= 0, torch.nan)
    fade = rope.decay.rate(dim) if rope.decay else None
    cosine = _mean_cos(distance, rope.inv_freq(dim, length), fade)
    return [line[0] for line in lines], r, cosine


def extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each row, nan ignored; infinite if there is none."""
    inf = torch.inf
    return values.nan_to_num(nan=inf).amin(1), values.nan_to_num(nan=-inf).amax(1)


def _mean_cos(r: Tensor, theta: Tensor, fade: Tensor | None = None) -> Tensor:
    waves = torch.cos(r[..., None] * theta)
    return (waves if fade is None else waves * torch.exp(r[..., None] * fade)).mean(-1)


def from_last(scheme: Scheme, length: int, r: Tensor) -> Tensor:
    """The remapped distance of the keys r tokens before the last query."""
    last = positions(scheme, length, torch.tensor(length - 1))
    return remapped_distance(scheme, last, positions(scheme, length, length - 1 - r))


def wavelengths(scheme: Scheme, length: int, head_dim: int) -> tuple[rows.WavelengthRow, ...]:
    """Each rotary pair's wavelength, unscaled and scaled, and how it was scaled."""
    rope = scheme.rotary
    if rope is None:
        return ()
    dim = rope.dim(head_dim)
    plain = 2 * math.pi / rope.inv_freq(dim, length, Unscaled())
    scaled = 2 * math.pi / rope.inv_freq(dim, length)
    stretch = (scaled / plain).tolist()
    largest = max((s for s in stretch if math.isfinite(s)), default=1.0)

    def state(stretch: float) -> str:
        if not math.isfinite(stretch):
            return "still"
        if abs(stretch - 1) < SAME:
            return "kept"
        if stretch < 1:
            return "shortened"
        return "interpolated" if stretch > largest * (1 - SAME) else "mixed"

    columns = (plain.tolist(), map(number, scaled.tolist()), map(state, stretch))
    return tuple(map(rows.WavelengthRow, range(len(stretch)), *columns))


# bias, scale, mask


def bias(scheme: Scheme, length: int, dims: Dims) -> tuple[rows.BiasRow, ...]:
    """What each of a few heads adds to its scores by distance; the query of a bidirectional scheme
    stands in the middle."""
    if not scheme.bias:
        return ()
    query = length - 1 if scheme.causal else length // 2
    ahead = [] if scheme.causal else [-r for r in sample(length - query)[:0:-1]]
    distance = [*ahead, *sample(query + 1)]
    groups: list[list[int]] = []
    for r in distance:
        if groups and r - groups[-1][0] < MAX_SPAN:
            groups[-1].append(r)
        else:
            groups.append([r])
    model, at = ScoreModel(scheme, length, dims), torch.tensor([query])
    values = torch.cat([model.bias(at, query - torch.tensor(r), contents=1) for r in groups])
    hidden = model.remapped_distance(at, query - torch.tensor(distance)).isnan()
    values = values.masked_fill(hidden[:, None], torch.nan)
    count = min(dims.heads, HEADS)
    heads = [round(s * (dims.heads - 1) / max(count - 1, 1)) for s in range(count)]
    return tuple(
        rows.BiasRow(h, r, number(v))
        for h in heads
        for r, v in zip(distance, values[:, h].tolist(), strict=True)
    )


def scale(scheme: Scheme, length: int, dims: Dims) -> tuple[rows.ScaleRow, ...]:
    """The factor on each query's logits, of the first head where heads differ."""
    if not scheme.scale:
        return ()
    tokens = torch.tensor(sample(length))
    factor = ScoreModel(scheme, length, dims).scale(tokens)
    seen = visible_keys(scheme, length, tokens)
    return tuple(map(rows.ScaleRow, tokens.tolist(), seen.tolist(), factor.tolist()))


def grid(scheme: Scheme, length: int) -> rows.Grid:
    """Which pairs are visible, and at which remapped distance, for evenly spaced tokens."""
    count = min(GRID, length)
    tokens = [round(s * (length - 1) / max(count - 1, 1)) for s in range(count)]
    p = positions(scheme, length, torch.tensor(tokens))
    lines = remapped_distance(scheme, p[:, None], p[None, :]).tolist()
    return rows.Grid(tuple(tokens), tuple(tuple(number(v) for v in line) for line in lines))
