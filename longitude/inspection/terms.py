"""What a scheme adds to scores and multiplies into queries, at fresh weights if any are learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longitude.core.part import Dims, Weights
from longitude.core.scheme import Scheme
from longitude.inspection.curves import believed, number, positions, sample
from longitude.inspection.rows import BiasRow, ScaleRow

SEED = 0
HEADS = 4  # drawn of each bias
APART = 4096  # distances that are asked for at once


def bias(scheme: Scheme, length: int, dims: Dims) -> tuple[BiasRow, ...]:
    """What each of a few heads adds to its scores by distance; the query of a scheme that sees
    ahead stands in the middle."""
    if not scheme.bias:
        return ()
    query = length - 1 if scheme.causal else length // 2
    ahead = [] if scheme.causal else [-r for r in sample(length - query)[:0:-1]]
    away = torch.tensor([*ahead, *sample(query + 1)])
    add = _adder(scheme, length, dims, content(scheme, dims))
    values = torch.cat([add(query, query - r) for r in _near(away.tolist())])
    i, j = (positions(scheme, length, t) for t in (torch.tensor(query), query - away))
    values = values.where(~believed(scheme, i, j).isnan()[:, None], torch.nan)
    return tuple(
        BiasRow(h, r, number(v))
        for h in shown_heads(dims.heads)
        for r, v in zip(away.tolist(), values[:, h].tolist(), strict=True)
    )


def by_content(scheme: Scheme, length: int, dims: Dims) -> bool:
    """Whether what is added depends on what query and key say, and not on where they are alone."""
    q, k = content(scheme, dims)
    first = torch.tensor([0])
    given = _adder(scheme, length, dims, (q, k))(length - 1, first)
    blank = _adder(scheme, length, dims, (q * 0, k * 0))(length - 1, first)
    return not torch.equal(given, blank)


def scale(scheme: Scheme, length: int, dims: Dims) -> tuple[ScaleRow, ...]:
    """The factor on each query's logits, of the first head where heads differ."""
    if not scheme.scale:
        return ()
    tokens = torch.tensor(sample(length))
    seen = count_seen(scheme, length, tokens)
    q_pos = positions(scheme, length, tokens)[None]
    factor = torch.ones(1, 1, len(tokens), dtype=torch.float64)
    weights = fresh(scheme, dims)
    for part in scheme.scale:
        factor = factor * part.scale(q_pos, seen[None], weights[name(part)])
    rows = zip(tokens.tolist(), seen.tolist(), factor[0, 0].tolist(), strict=True)
    return tuple(ScaleRow(*row) for row in rows)


def count_seen(scheme: Scheme, length: int, tokens: Tensor) -> Tensor:
    """How many keys each of these queries may see, counted by positions as attention counts."""
    where = positions(scheme, length, tokens)
    seen = torch.zeros_like(tokens)
    for area in scheme.areas():
        start, stop = area.interval(where)
        stop = stop if scheme.causal else stop.clamp(max=length)
        seen = seen + (stop - start).clamp(min=0)
    return seen


def fresh(scheme: Scheme, dims: Dims) -> dict[str, Weights]:
    """Fresh weights in float64 by part, the same each time; those at the input are not drawn."""
    scored = replace(scheme, embed=None)
    drawn = scored.init(dims, torch.Generator().manual_seed(SEED))
    found: dict[str, Weights] = {name(p): {} for p in scored.parts}
    for key, weight in drawn.items():
        part, _, own = key.partition(".")
        found[part][own] = weight.double()
    return found


def learned(scheme: Scheme, dims: Dims) -> list[str]:
    """The names of the parts that were given fresh weights."""
    return [part for part, weights in fresh(scheme, dims).items() if weights]


def name(part: Any) -> str:
    """A part's name in the written form."""
    return part.name


def shown_heads(heads: int) -> list[int]:
    """A few heads from the first to the last."""
    count = min(heads, HEADS)
    return [round(s * (heads - 1) / max(count - 1, 1)) for s in range(count)]


def content(scheme: Scheme, dims: Dims) -> tuple[Tensor, Tensor]:
    """One random query, scaled as attention scales it, and one random key."""
    rng = torch.Generator().manual_seed(SEED)
    shape = (1, dims.heads, 1, dims.head_dim)
    q, k = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    return q * scheme.softmax_scale(dims.head_dim), k


def _adder(
    scheme: Scheme, length: int, dims: Dims, said: tuple[Tensor, Tensor]
) -> Callable[[int, Tensor], Tensor]:
    """The sum of the scheme's terms for a query and some key tokens, (keys, heads)."""
    weights, scale_by = fresh(scheme, dims), scheme.softmax_scale(dims.head_dim)
    query_says, key_says = said

    def add(query: int, keys: Tensor) -> Tensor:
        i, j = (positions(scheme, length, t)[None] for t in (torch.tensor([query]), keys))
        each = key_says.expand(-1, -1, len(keys), -1)
        at = torch.tensor(0), torch.arange(dims.heads), torch.tensor(0)
        total = torch.zeros(len(keys), dims.heads, dtype=torch.float64)
        for p in scheme.bias:
            term = p.term(query_says, each, i, j, weights[name(p)], scale_by)
            total = total + term(*at, torch.arange(len(keys))[:, None])
        return total

    return add


def _near(numbers: list[int]) -> list[Tensor]:
    """Rising numbers in groups of neighbours.

    A part may make a table of every distance between those it is given, so they must not be far
    apart.
    """
    groups: list[list[int]] = []
    for n in numbers:
        if groups and n - groups[-1][0] < APART:
            groups[-1].append(n)
        else:
            groups.append([n])
    return [torch.tensor(g) for g in groups]
