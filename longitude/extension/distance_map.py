"""The distance map of a scheme: what distance a model is told at each true distance.

A remap tells one number. Scaled frequencies tell each pair of dimensions its own: a pair that
turns at θ' where the model learned θ sees the distance r as r θ'/θ. A bias of ALiBi's kind that is
b' where the model learned b shows r as r b'/b to its head. So a map is a band, from the least to
the greatest over pairs, heads and layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from longitude.core.part import Dims
from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.inspection.catalogue import default_dim, distinct_layers
from longitude.inspection.curves import bias, sample
from longitude.inspection.score_variance import positions, remapped_distance

MapPoint = tuple[float, float | None, float | None]  # true distance, minimum, maximum
HEADS = 8
OTHER = 128  # a size of a head that models have, other than the 64 that are drawn


def maps(
    schemes: Mapping[str, str], own: str, length: int, size: int | None = None
) -> dict[str, list[MapPoint]]:
    """The map of each label whose scheme works by distance, up to a length."""
    found: dict[str, list[MapPoint]] = {}
    for label, text in schemes.items():
        try:
            points = distance_map(text, own, length, size)
        except UserError:  # a scheme that can't be drawn at this length has no map
            points = []
        found |= {label: points} if points else {}
    return found


def by_size(schemes: Mapping[str, str], own: str, length: int) -> list[str]:
    """The labels whose map is another where heads have another size."""
    drawn, other = maps(schemes, own, length), maps(schemes, own, length, OTHER)
    return [s for s, points in drawn.items() if s in other and not _same(points, other[s])]


def _same(a: Sequence[MapPoint], b: Sequence[MapPoint]) -> bool:
    """Whether two maps look the same: within a hundredth."""
    ends = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return all(x == y or (x and y and abs(x - y) <= 0.01 * abs(x)) for x, y in ends)


def distance_map(text: str, own: str, length: int, size: int | None = None) -> list[MapPoint]:
    """(true distance, least and greatest that is told) of a scheme, for the last query; None where
    it sees nothing. Empty where the scheme has neither a rotation nor a bias. Heads have 64
    dimensions unless `size` says otherwise."""
    first = next(iter(distinct_layers(parse(own))))
    return map_of(distinct_layers(parse(text)), first, length, size)


def map_of(
    schemes: Iterable[Scheme], own: Scheme, length: int, size: int | None = None
) -> list[MapPoint]:
    """The map of the schemes of a model's layers beside its own."""
    r = torch.tensor(sample(length))
    ends = [e for s in schemes if (e := _ends(s, own, length, r, size))]
    if not ends:
        return []
    low = torch.stack([e[0] for e in ends]).nan_to_num(torch.inf).amin(0)
    high = torch.stack([e[1] for e in ends]).nan_to_num(-torch.inf).amax(0)
    return [
        (x, a, b) if a <= b else (x, None, None)
        for x, a, b in zip(r.tolist(), low.tolist(), high.tolist(), strict=True)
    ]


def _ends(
    scheme: Scheme, own: Scheme, length: int, r: Tensor, size: int | None
) -> tuple[Tensor, Tensor] | None:
    """The least and the greatest distance told, nan where hidden."""
    last = positions(scheme, length, torch.tensor(length - 1))
    told = remapped_distance(scheme, last, positions(scheme, length, length - 1 - r))
    if scheme.rotary and own.rotary:
        stretch = _stretch(scheme, own, length, size)
        return told * stretch.amin(), told * stretch.amax()
    if scheme.bias and own.bias:
        by_head = _by_bias(scheme, own, length).to(told)
        return told * by_head.amin(0), told * by_head.amax(0)
    return None


def _stretch(scheme: Scheme, own: Scheme, length: int, wanted: int | None) -> Tensor:
    """Each pair's frequency over the one that the model learned; lists of factors have a size."""
    size = max(default_dim(scheme), default_dim(own))
    size = wanted if wanted and size == 64 else size
    new, old = (
        s.rotary.frequencies.inv_freq(s.rotary.dim(size), s.rotary.base, length)
        for s in (scheme, own)
        if s.rotary
    )
    ratio = new / old if new.shape == old.shape else torch.ones(1, dtype=new.dtype)
    known = ratio[ratio.isfinite()]
    return known if len(known) else torch.ones(1, dtype=new.dtype)


def _by_bias(scheme: Scheme, own: Scheme, length: int) -> Tensor:
    """Each head's bias over the one that the model learned, by distance; 1 where that was 0."""
    dims = Dims(dim=64 * HEADS, heads=HEADS, head_dim=64)
    new, old = (
        torch.tensor(
            [row.bias if row.bias is not None else torch.nan for row in bias(s, length, dims)]
        )
        for s in (scheme, own)
    )
    ratio = torch.where(old == 0, 1.0, new / old)
    return ratio.reshape(-1, len(sample(length)))
