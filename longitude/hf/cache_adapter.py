"""Adapter that exposes our cache as layers of a transformers cache.

Keys are cached pre-RoPE with their positions, and evicted by the mask. These layers replace those
of an empty dynamic cache, so `generate` needs no option. Attention reads the store directly;
`update` returns only the new tokens' keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from longitude.cache import Cache as Store
from longitude.core.part import Pos, as_tensor
from longitude.core.validate import UserError
from longitude.hf.layer import LAYER_STATE

if TYPE_CHECKING:
    from longitude.hf.layer import LayerState
    from longitude.hf.model_state import ModelState

# these exact types: derived classes hold more than keys and values
REPLACEABLE = (DynamicLayer, DynamicSlidingWindowLayer)


def adapt(cache: Cache, layers: dict[int, LayerState]) -> None:
    """Replace the layers of an empty dynamic cache with ours."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        return
    make = getattr(cache, "layer_class_to_replicate", None)
    while make is not None and len(cache.layers) <= max(layers):
        cache.layers.append(make())
    for index, layer in layers.items():
        if index >= len(cache.layers):  # an early exit runs the first layers only
            continue
        replaceable = type(cache.layers[index]) in (*REPLACEABLE, CacheLayer)
        if layer.probed.plain_cache and replaceable:
            cache.layers[index] = CacheLayer(layer)


@dataclass
class Held:
    """What a transformers cache lacks: the positions of its keys, which are pre-RoPE, the total
    length that it was opened for, and the patched model."""

    model: ModelState
    pos: Pos
    length: int | Tensor | None

    def __deepcopy__(self, memo: Any) -> Held:
        return replace(self)


def hold(cache: Any, model: ModelState, pos: Pos, length: int | Tensor | None = None) -> None:
    """Attach positions to a transformers cache, and make it refuse tokens after the patch ends."""
    setattr(cache, LAYER_STATE, Held(model, pos, length))
    if not isinstance(cache, _Holding):
        cache.__class__ = _holding(type(cache))


@cache
def _holding(kind: type) -> type:
    return type(kind.__name__, (_Holding, kind), {"__module__": kind.__module__})


class _Holding:
    """Mixin for a cache's class: what changes its rows changes their positions in the same way."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        held: Held = getattr(self, LAYER_STATE)
        layer = next(iter(held.model.layers.values()))
        if not layer.active and self.get_seq_length() == 0:
            self.__class__ = type(self).__bases__[1]
            delattr(self, LAYER_STATE)
            return self.update(*args, **kwargs)
        check_active(layer)
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows("reorder_cache", beam_idx, lambda x: x[beam_idx.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        repeat = partial(torch.repeat_interleave, repeats=repeats, dim=0)
        self._map_rows("batch_repeat_interleave", repeats, repeat)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows("batch_select_indices", indices, lambda x: x[indices.to(x.device)])

    def _map_rows(self, name: str, given: Any, change: Callable[[Tensor], Tensor]) -> None:
        getattr(super(), name)(given)
        held: Held = getattr(self, LAYER_STATE)
        for field in ("pos", "length"):
            if isinstance(rows := getattr(held, field), Tensor) and rows.shape[0] > 1:
                setattr(held, field, change(rows))


def check_active(layer: LayerState) -> None:
    """Raise if the patch that filled a cache has ended."""
    if not layer.active:
        raise UserError(
            f"this cache was opened while the model was patched with {layer.scheme}, which it no "
            f"longer is: open a new one."
        )


class CacheLayer(CacheLayerMixin):
    """One layer's keys and values, with the interface of transformers' cache layers."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, layer: LayerState) -> None:
        super().__init__()
        self.layer, self.store = layer, None
        self.columns = 0  # over a group: tokens that all ranks together have seen
        self.without_length = False  # opened for a length that further tokens would change

    def __deepcopy__(self, memo: Any) -> CacheLayer:
        """Copy the tokens but not the patched model, as for several answers to one prompt."""
        other = copy.copy(self)
        other.store = copy.deepcopy(self.store, memo)
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Open the store now that the total length is known, if it is known at all."""
        forward, rope = self.layer.model.forward, self.layer.scheme.rotary
        length: Any = forward.length
        if rope and rope.frequencies.by_length and length is None:
            length, self.without_length = forward.reached(key_states.shape[0]), True
        self.store = Store(self.layer.scheme, length)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens' keys and values."""
        check_active(self.layer)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.without_length:
            raise UserError(
                f"{self.layer.scheme} depends on the total length, and this cache was opened "
                f"without one: use generate(), or patched(model, scheme, length=…)."
            )
        assert self.store is not None
        forward, keys = self.layer.model.forward, self.layer.new_tokens(key_states)
        self.columns += forward.columns
        if (kept := forward.kept) is not None:  # the other ranks cache the other tokens
            pos, padding = as_tensor(forward.pos, kept.device)[..., kept], forward.new_padding
            padding = None if padding is None else padding[:, kept]
            self.store.add(keys[:, :, kept], value_states[:, :, kept], pos, padding)
        else:
            unseen = forward.new_padding if forward.unseen is None else forward.unseen
            self.store.add(keys, value_states, forward.pos, unseen)
        return key_states, value_states

    def get_seq_length(self) -> int:
        if self.layer.model.ranks is not None:
            return self.columns
        return self.store.seen if self.store is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def crop(self, tokens: int) -> None:
        """Drop the last -tokens; before transformers 5.20, a positive number keeps the first."""
        if self.layer.model.ranks is not None:
            raise UserError("a cache over a group can't be cropped: generate without an assistant.")
        if self.store is not None and tokens:
            self.store.crop(self.get_seq_length() + tokens if tokens < 0 else tokens)

    def activate_past_recording(self) -> None:
        """Nothing to do: the store keeps a slack of its own."""

    def reset(self) -> None:
        self.store, self.without_length, self.is_initialized = None, False, False
        self.columns = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.store.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            self.store.select(indices)

    def offload(self) -> None:
        """Nothing to do: the store stays on its device."""

    prefetch = offload
