"""A trunk: the part of a model that makes positions once and hands them to all its layers.

It is the module that owns the rotary embedding. While patched, that embedding turns nothing (cosine
1, sine 0) and only tells which positions it was asked for, so keys reach attention and any cache
unturned. What the layers of one forward share is kept here, from the forward's first line to its
last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longitude.core.part import Pos, as_tensor
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.layer import LayerState, TokenRun, as_range, token_runs


def model_states(model: nn.Module) -> list[ModelState]:
    """The modules of a model that own rotary embeddings of positions."""
    found = []
    for module in model.modules():
        rotaries = [child for child in module.children() if _rotary(child)]
        if rotaries:
            found.append(ModelState(module, rotaries))
    return found


def _rotary(module: nn.Module) -> bool:
    named = "Rotary" in type(module).__name__
    return named and "position_ids" in inspect.signature(type(module).forward).parameters


class ModelState:
    """One trunk, and what its forward under way knows."""

    def __init__(self, module: nn.Module, rotaries: list[nn.Module]) -> None:
        self.module, self.rotaries = module, rotaries
        self.names = tuple(inspect.signature(module.forward).parameters)
        self.seats: dict[int, LayerState] = {}
        self.asked: int | None = None  # the length that length-dependent frequencies are to see
        self.reach: int | None = None  # how far `generate` will go, padding included
        self._records: WeakKeyDictionary[Any, Pos] = WeakKeyDictionary()
        self._clear()

    def _clear(self) -> None:
        self.pos: Pos = range(0)
        self.past = 0  # tokens before this forward
        self.pieces: list[TokenRun] | None = None  # None: every row is the one range
        self.length: int | Tensor | None = None
        self.hidden: Tensor | None = None  # (b, past + tokens), True where a token is padding
        self._cache: Any = None
        self._ids: Tensor | None = None

    @property
    def config(self) -> Any:
        return self.module.config

    # hooks of the trunk's forward

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the forward: see the padding, take over a fresh cache or make one."""
        self._clear()
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        self.hidden = padding_of(given.get("attention_mask"))
        cache = given.get("past_key_values")
        if cache is None and "past_key_values" in self.names and self._wants_cache(given):
            from transformers import DynamicCache

            cache = DynamicCache(config=self.config)
            args, kwargs = (), {**given, "past_key_values": cache}
        if cache is not None:
            self._take(cache)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """After the forward, however it ended: forget it, but not a cache the model made itself."""
        made = getattr(out, "past_key_values", None)
        if made is not None and self._cache is None:
            self._records[made] = self.pos
        self._clear()

    def _wants_cache(self, given: dict[str, Any]) -> bool:
        use = given.get("use_cache")
        use = getattr(self.config, "use_cache", False) if use is None else use
        saved = self.module.training and getattr(self.module, "gradient_checkpointing", False)
        ours = all(seat.scheme.causal and seat.kept for seat in self.seats.values())
        return bool(use) and not saved and ours

    def _take(self, cache: Any) -> None:
        from longitude.hf.cache_adapter import Layer, adopt, own

        self._cache = cache = own(cache)
        self.past = int(cache.get_seq_length(min(self.seats)))
        if self.past == 0:
            adopt(cache, self.seats)
        ours = isinstance(cache.layers[min(self.seats)], Layer) if cache.layers else False
        if self.past and not ours and cache not in self._records:
            raise UserError(
                f"the cache holds {self.past} tokens whose keys this patch never saw: "
                f"open a new cache inside it."
            )

    def at(self, ids: Tensor, rows: int) -> None:
        """The forward's positions, as the rotary embedding was asked for them."""
        if self._ids is ids:
            return
        self._ids = ids
        ids = _one_axis(ids)
        whole = as_range(ids)
        self.pos = ids if whole is None else whole
        new = None if self.hidden is None else self.hidden[:, -ids.shape[1] :]
        if self.past == 0 and (whole is None or new is not None):
            self.pieces = token_runs(ids.expand(rows, -1), new)
        self.length = self._length(rows)
        if self._cache is not None:
            self._record(rows)

    def _length(self, rows: int) -> int | Tensor | None:
        if self.asked is not None or self.reach is None:
            return self.asked
        if self.hidden is None:
            return self.reach
        return self.reach - self.hidden.sum(1).expand(rows)

    def _record(self, rows: int) -> None:
        """Keep the positions beside a cache that can't."""
        if self.store(min(self.seats)) is not None:
            return
        before, new = self._records.get(self._cache, range(0)), self.pos
        before = before[: self.past] if isinstance(before, range) else before[:, : self.past]
        if isinstance(before, range) and isinstance(new, range) and before.stop == new.start:
            self._records[self._cache] = range(before.start, new.stop)
            return
        both = [torch.atleast_2d(as_tensor(pos, self._device())) for pos in (before, new)]
        self._records[self._cache] = torch.cat([pos.expand(rows, -1) for pos in both], 1)

    # what the seats ask

    @property
    def padding(self) -> Tensor | None:
        """Which of the new tokens are padding."""
        n = len(self.pos) if isinstance(self.pos, range) else self.pos.shape[1]
        return None if self.hidden is None else self.hidden[:, -n:]

    def store(self, layer: int) -> Any:
        """Our own cache of a layer, or None."""
        from longitude.hf.cache_adapter import Layer

        layers = () if self._cache is None else self._cache.layers
        found = layers[layer] if layer < len(layers) else None
        return found.store if isinstance(found, Layer) else None

    def reached(self, rows: int) -> int | Tensor:
        """How far this forward's tokens go: the last position of each row, and one."""
        if isinstance(self.pos, range):
            return self.pos[-1] + 1
        pos = self.pos.expand(rows, -1)
        return (pos if self.padding is None else pos.masked_fill(self.padding, -1)).amax(1) + 1

    def keys(self, places: int, scheme: Scheme) -> tuple[slice, Pos, Tensor | None]:
        """Of the places that a cache of transformers' hands out: which are taken, the positions of
        their keys, and which of them are padding."""
        pos, hidden = self._records[self._cache], self.hidden
        total = len(pos) if isinstance(pos, range) else pos.shape[1]
        if hidden is not None and hidden.shape[1] < total:
            raise UserError(
                f"the attention mask has {hidden.shape[1]} columns for {total} tokens: give it one "
                f"for each token, those of the cache too."
            )
        taken = min(places, total)  # a static cache has free places, a sliding one the last tokens
        first = total - taken
        if first and self._sees(scheme, pos[:first] if isinstance(pos, range) else pos[:, :first]):
            raise UserError(
                f"this cache keeps the last {taken} of {total} tokens, but {shown(scheme)} sees "
                f"further back: use a dynamic cache."
            )
        pos = pos[first:] if isinstance(pos, range) else pos[:, first:]
        return slice(taken), pos, None if hidden is None else hidden[:, first:total]

    def _sees(self, scheme: Scheme, gone: Pos) -> bool:
        """Whether a scheme would show keys that a cache has dropped to the tokens that are new."""
        rows = [torch.atleast_2d(as_tensor(pos, self._device())) for pos in (self.pos, gone)]
        return bool(visible(scheme.areas(), rows[0][:, :, None], rows[1][:, None]).any())

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device


def identity_rotation(rotary: nn.Module, trunk: ModelState) -> Callable[..., Any]:
    """A forward for the rotary embedding that turns nothing and tells the trunk its positions."""

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        trunk.at(position_ids, x.shape[0])
        # at position 0 for the shape alone: a greater one may change its frequencies for good
        made = type(rotary).forward(rotary, x, torch.zeros_like(position_ids), *args, **kwargs)
        if isinstance(made, tuple):
            return torch.ones_like(made[0]), torch.zeros_like(made[1])
        return torch.ones_like(made)

    return forward


def padding_of(mask: Any) -> Tensor | None:
    """Which tokens are padding (b n), from the mask a model was called with; None if none is."""
    if isinstance(mask, dict):  # a mask for each kind of layer, made beforehand
        mask = next((one for one in mask.values() if one is not None), None)
    if mask is None:
        return None
    if mask.dim() == 4:
        if mask.shape[1:3] != (1, 1) or mask.dtype != torch.bool:
            raise UserError(
                f"a patched model makes its mask from its scheme, but got one of "
                f"{tuple(mask.shape)}: give attention_mask as (batch, tokens), 0 for padding."
            )
        mask = mask[:, 0, 0]
    hidden = ~mask.bool()
    return hidden if bool(hidden.any()) else None


def _one_axis(ids: Tensor) -> Tensor:
    """Positions (b n): those of a multimodal rotary embedding count if its axes agree."""
    if ids.dim() == 3:
        if not bool((ids == ids[:1]).all()):
            raise UserError(
                "the positions differ between the axes of a multimodal rotary embedding: "
                "patched models read text only."
            )
        ids = ids[0]
    return torch.atleast_2d(ids)
