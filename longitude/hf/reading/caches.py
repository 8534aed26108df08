"""Caches of many rows: one beginning for all of them, padding moved, windows joined end to end.

All of it is moving keys and values about, so it takes caches that hold these and nothing else:
transformers' dynamic layers. A cache of another kind (states of linear attention, a patch's own
layers) is used as it is, or refused where it would have to be taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from longitude.fields import Mistake
from longitude.hf.patch import PATCH

Spans = Sequence[tuple[int, int, int]]  # (row, from, to): tokens of a row


def movable(model: nn.Module) -> bool:
    """Whether a model's cache holds nothing but keys and values, as they were made."""
    layers = DynamicCache(config=model.config).layers  # type: ignore[arg-type]
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return PATCH not in vars(model) and all(type(layer) in kinds for layer in layers)


def local(model: nn.Module) -> bool:
    """Whether some layers see the last tokens of a cache only."""
    layers = DynamicCache(config=model.config).layers  # type: ignore[arg-type]
    return any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers)


def fresh(model: nn.Module) -> Any:
    """An empty cache. One that can be moved keeps every token, also where a layer's own mask hides
    the far ones: which are far is not known before the padding is."""
    return DynamicCache() if movable(model) else DynamicCache(config=model.config)  # type: ignore[arg-type]


def repeated(cache: Any, rows: int) -> Any:
    """The one row of a cache, for each of these rows; the cache itself stays as it is."""
    made = DynamicCache()
    for index, (keys, values) in enumerate(_held(cache)):
        sizes = (rows, -1, -1, -1)
        made.update(keys.expand(sizes), values.expand(sizes), index)
    return made


def moved(cache: Any, by: Sequence[int]) -> None:
    """Move each row's tokens towards the end by so many places, and what stood there to the
    beginning: padding on the right becomes padding on the left."""
    if not any(by):
        return
    for layer in cache.layers:
        layer.keys, layer.values = (
            torch.stack([row.roll(n, 1) for row, n in zip(x, by, strict=True)])
            for x in (layer.keys, layer.values)
        )


def taken(cache: Any, spans: Spans) -> list[list[tuple[Tensor, Tensor]]]:
    """Keys and values of these tokens, by span and layer, as copies of their own: the rest of the
    cache can go."""
    held = _held(cache)
    return [
        [tuple(x[row : row + 1, :, a:b].clone() for x in pair) for pair in held]  # type: ignore[misc]
        for row, a, b in spans
    ]


def joined(parts: Sequence[list[tuple[Tensor, Tensor]]]) -> Any:
    """One row whose tokens are those of all parts."""
    made = DynamicCache()
    for index, pairs in enumerate(zip(*parts, strict=True)):
        keys, values = (torch.cat(each, 2) for each in zip(*pairs, strict=True))
        made.update(keys, values, index)
    return made


def size(cache: Any) -> int:
    """Bytes that a cache holds, as far as it tells."""
    pairs = [
        (getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers
    ]
    return sum(x.nbytes for pair in pairs for x in pair if isinstance(x, Tensor))


def _held(cache: Any) -> list[tuple[Tensor, Tensor]]:
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        raise Mistake(
            "windows are joined in a cache of keys and values alone, and this model's holds more: "
            "read it with nbce, or without a patch."
        )
    return [(layer.keys, layer.values) for layer in cache.layers]
