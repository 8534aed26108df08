"""Adapter that exposes our cache as layers of a transformers cache.

Keys are held pre-RoPE with their positions, and the mask evicts. An empty dynamic cache gets its
layers replaced by these, so `generate` needs no option. Attention reads the store itself; `update`
returns the new tokens' own keys and values.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from longitude.cache import Cache as Store
from longitude.core.part import as_tensor
from longitude.core.validate import UserError

if TYPE_CHECKING:
    from longitude.hf.layer import LayerState

# exactly these: classes derived from them hold more than keys and values
REPLACEABLE = (DynamicLayer, DynamicSlidingWindowLayer)


def adapt(cache: Cache, layers: dict[int, LayerState]) -> None:
    """Replace the layers of an empty dynamic cache by ours."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        return
    make = getattr(cache, "layer_class_to_replicate", None)
    while make is not None and len(cache.layers) <= max(layers):
        cache.layers.append(make())
    for index, layer in layers.items():
        replaceable = type(cache.layers[index]) in (*REPLACEABLE, CacheLayer)
        if layer.probed.plain_cache and replaceable:
            cache.layers[index] = CacheLayer(layer)


class CacheLayer(CacheLayerMixin):
    """One layer's keys and values, with the interface of transformers' cache layers."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, layer: LayerState) -> None:
        super().__init__()
        self.layer, self.store = layer, None
        self.columns = 0  # over a group: tokens that all ranks have seen
        self.without_length = False  # opened for a length that further tokens would change

    def __deepcopy__(self, memo: Any) -> CacheLayer:
        """A prompt's cache for several answers: tokens are copied, the patched model is not."""
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
        if not self.layer.active:
            raise UserError(
                f"this cache was opened while the model was patched with {self.layer.scheme}, "
                f"which it no longer is: open a new one."
            )
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
        if (kept := forward.kept) is not None:  # the other ranks keep the other tokens
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
        """Drop the last -tokens; before transformers 5.20 also all but the first `tokens`."""
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
