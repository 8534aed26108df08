"""transformers' skin of our cache: keys unturned, positions beside them, eviction by the mask.

A dynamic cache that is still empty has its layers exchanged for these, so `generate` needs no word
about caches. Attention reads the store itself; what `update` returns are the new tokens' own keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from longitude.cache import Cache as Store
from longitude.core.validate import UserError

if TYPE_CHECKING:
    from longitude.hf.layer import LayerState

REPLACED = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
)  # these themselves: what derives from them has more


def own(cache: Any) -> Any:
    """The part of a cache that holds a decoder's own tokens."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def adopt(cache: Cache, seats: dict[int, LayerState]) -> None:
    """Give an empty dynamic cache our layers, where a seat has one."""
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        return
    make = getattr(cache, "layer_class_to_replicate", None)
    while make is not None and len(cache.layers) <= max(seats):
        cache.layers.append(make())
    for index, seat in seats.items():
        if not seat.kept:
            continue
        if type(cache.layers[index]) in REPLACED or isinstance(cache.layers[index], Layer):
            cache.layers[index] = Layer(seat)


class Layer(CacheLayerMixin):
    """One layer's keys and values, as transformers' caches hold them."""

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, seat: LayerState) -> None:
        super().__init__()
        self.seat, self.store = seat, None
        self.opened_for: Any = None  # a length nobody fixed, which further tokens would change

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Open the store: now the length is known, if it is at all."""
        trunk, rope = self.seat.trunk, self.seat.scheme.rotary
        length: Any = trunk.length
        if rope and rope.frequencies.by_length and length is None:
            length = self.opened_for = trunk.reached(key_states.shape[0])
        self.store = Store(self.seat.scheme, length)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep new tokens' keys and values; attention reads the store."""
        if not self.seat.active:
            raise UserError(
                f"this cache was opened while the model was patched with {self.seat.scheme}, "
                f"which it no longer is: open a new one."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.opened_for is not None:
            raise UserError(
                f"{self.seat.scheme} depends on the total length, and this cache was opened "
                f"without one: use generate(), or patched(model, scheme, length=…)."
            )
        trunk = self.seat.trunk
        assert self.store is not None
        self.store.add(self.seat.front(key_states), value_states, trunk.pos, trunk.padding)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.store.seen if self.store is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def crop(self, tokens: int) -> None:
        """Forget the last -tokens; before transformers 5.20 also all but the first tokens."""
        if self.store is not None and tokens:
            self.store.crop(self.get_seq_length() + tokens if tokens < 0 else tokens)

    def activate_past_recording(self) -> None:
        """The store keeps a slack of its own."""

    def reset(self) -> None:
        self.store, self.opened_for, self.is_initialized = None, None, False

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
        """The store stays where it is."""

    prefetch = offload
