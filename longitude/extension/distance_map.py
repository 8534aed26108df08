"""The distance map of a scheme: the effective distance of a key at each true distance.

A remap gives one number. Scaled frequencies give each pair of dimensions its own: a pair that
rotates at θ' where the model learned θ sees the distance r as r θ'/θ. A head whose ALiBi-like bias
is b' where the model learned b sees r as r b'/b. So a map is a band, from the least to the greatest
effective distance over pairs, heads and layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from longitude.core.part import Dims
from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.inspection.catalogue import default_dim, distinct_layers
from longitude.inspection.curves import bias, from_last, sample

HEADS = 8
HEAD_DIM, OTHER_HEAD_DIM = 64, 128  # the size that is drawn, and another common one
MapPoint = tuple[float, float | None, float | None]  # true distance, least and greatest effective


def maps(
    schemes: Mapping[str, str], own: str, length: int, head_dim: int | None = None
) -> dict[str, list[MapPoint]]:
    """Distance maps up to a length, by label; schemes without a rotation or a bias have none."""
    drawn = {}
    for label, text in schemes.items():
        with suppress(UserError):  # a scheme that can't be drawn at this length has no map
            drawn[label] = distance_map(text, own, length, head_dim)
    return {label: points for label, points in drawn.items() if points}


def by_size(schemes: Mapping[str, str], own: str, length: int) -> list[str]:
    """The labels whose map differs by more than 1 % for heads of another size."""
    drawn, other = maps(schemes, own, length), maps(schemes, own, length, OTHER_HEAD_DIM)

    def same(label: str) -> bool:
        ends = zip(sum(drawn[label], ()), sum(other[label], ()), strict=True)
        return all(x == y or (x and y and abs(x - y) <= 0.01 * abs(x)) for x, y in ends)

    return [label for label in drawn if label in other and not same(label)]


def distance_map(text: str, own: str, length: int, head_dim: int | None = None) -> list[MapPoint]:
    """Points (true distance, least effective, greatest effective) of a scheme for the last query;
    None where the key is hidden. Empty if the scheme has neither a rotation nor a bias."""
    first = next(iter(distinct_layers(parse(own))))
    return map_of(distinct_layers(parse(text)), first, length, head_dim)


def map_of(
    layers: Iterable[Scheme], own: Scheme, length: int, head_dim: int | None = None
) -> list[MapPoint]:
    """The map of the schemes of a model's layers, relative to its own scheme."""
    r = torch.tensor(sample(length))
    bands = [band for layer in layers if (band := _band(layer, own, length, r, head_dim))]
    if not bands:
        return []
    low = torch.stack([band[0] for band in bands]).nan_to_num(torch.inf).amin(0)
    high = torch.stack([band[1] for band in bands]).nan_to_num(-torch.inf).amax(0)
    return [
        (x, a, b) if a <= b else (x, None, None)
        for x, a, b in zip(r.tolist(), low.tolist(), high.tolist(), strict=True)
    ]


def _band(
    scheme: Scheme, own: Scheme, length: int, r: Tensor, head_dim: int | None
) -> tuple[Tensor, Tensor] | None:
    """Least and greatest effective distances, nan where hidden; None without rotation or bias."""
    effective = from_last(scheme, length, r)
    if scheme.rotary and own.rotary:
        size = max(default_dim(scheme), default_dim(own))  # a list of factors fixes the size
        size = head_dim if head_dim and size == HEAD_DIM else size
        new, old = (rope.inv_freq(rope.dim(size), length) for rope in (scheme.rotary, own.rotary))
        ratio = new / old if new.shape == old.shape else torch.ones(1, dtype=new.dtype)
        ratio = ratio[ratio.isfinite()]
        ratio = ratio if len(ratio) else torch.ones(1, dtype=new.dtype)
        return effective * ratio.amin(), effective * ratio.amax()
    if scheme.bias and own.bias:
        dims = Dims(dim=HEAD_DIM * HEADS, heads=HEADS, head_dim=HEAD_DIM)
        new, old = (
            torch.tensor([torch.nan if b.bias is None else b.bias for b in bias(s, length, dims)])
            for s in (scheme, own)
        )
        ratio = torch.where(old == 0, 1.0, new / old).reshape(-1, len(r)).to(effective)
        return effective * ratio.amin(0), effective * ratio.amax(0)
    return None
