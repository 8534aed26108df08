"""A forward whose tokens stand where they are told to, whichever way the model places them.

Rotary and learned positions come in as `position_ids`. ALiBi has none: transformers makes its bias
from the places of a cache, so there each attention gets, on its way in, the bias of the positions
its keys really have: the model's own numbers for positions 0, 1, 2, …, read at those positions.

Caches of many rows: one beginning for all of them, padding moved, windows joined end to end.

All of it is moving keys and values about, so it takes caches that hold these and nothing else:
transformers' dynamic layers. A cache of another kind (states of linear attention, a patch's own
layers) is used as it is, or refused where it would have to be taken apart.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from longitude.core.validate import UserError, short
from longitude.hf.families import family_of
from longitude.hf.families.alibi import BLOOM, FALCON_RW, MPT, attentions
from longitude.hf.patch import patch_of

Table = Callable[[nn.Module, int, torch.dtype], Tensor]  # the bias (h, n) of positions 0 … n - 1


def check(model: nn.Module) -> None:
    """Raise where a model takes no positions."""
    if family_of(model) not in ALIBI and "position_ids" not in _names(model):
        raise UserError(
            f"{type(model).__name__} counts its tokens itself, so windows can't stand side by side "
            f"in it: read it with nbce."
        )


def alone(model: nn.Module) -> bool:
    """Whether rows at different positions can't be read together: MPT has one bias for all."""
    return family_of(model) is MPT


@torch.no_grad()
def logits(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    at: Int[Tensor, "b n"],
    cache: Any,
    *,
    mask: Int[Tensor, "b keys"] | None = None,
    keys: Int[Tensor, "#b keys"] | None = None,
) -> Float[Tensor, "b v"]:
    """What a model says after tokens at these positions.

    Args:
        mask: 0 for padding, cache included; None where there is none.
        keys: the positions of all keys, these tokens' too; None where they are 0, 1, 2, ….
    """
    few = {"logits_to_keep": 1} if "logits_to_keep" in _names(model) else {}
    said = _run(model, ids, at, cache, mask, keys, few).logits[:, -1]
    return said.to(torch.promote_types(said.dtype, torch.float32))


@torch.no_grad()
def read(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    at: Int[Tensor, "b n"],
    cache: Any,
    *,
    keys: Int[Tensor, "#b keys"] | None = None,
) -> None:
    """The same without a word: the cache is all that is wanted."""
    body = getattr(model, "base_model", model)
    _run(body, ids, at, cache, None, keys, {})


def _run(
    model: Any, ids: Tensor, at: Tensor, cache: Any, mask: Any, keys: Any, more: dict[str, Any]
) -> Any:
    given = {"input_ids": ids, "past_key_values": cache, "use_cache": True} | more
    if "position_ids" in _names(model):
        given["position_ids"] = at
    if mask is not None:
        given["attention_mask"] = mask
    with _biased(model, keys):
        try:
            return model(**given)
        except (TypeError, ValueError) as error:  # a cache or arguments of another kind
            raise UserError(
                f"{type(model).__name__} can't read a text in windows "
                f"({short(str(error), 120)}): use another model."
            ) from error


def _names(model: nn.Module) -> Any:
    return inspect.signature(model.forward).parameters


# ALiBi


@contextmanager
def _biased(model: nn.Module, keys: Tensor | None) -> Iterator[None]:
    """ALiBi models with the bias of these positions; any other as it is."""
    family = None if keys is None else family_of(model)
    if keys is None or family not in ALIBI:
        yield
        return
    table, kind, attention = ALIBI[family]
    made = table(model, int(keys.max()) + 1, model.dtype)  # type: ignore[arg-type]
    bias = made.to(keys.device)[:, keys].transpose(0, 1)[:, :, None]  # (b h 1 keys)

    def change(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | _arguments(kwargs, bias, getattr(module, "head_dim", 1))

    modules = attentions(model, kind, attention)
    hooks = [m.register_forward_pre_hook(change, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _arguments(given: dict[str, Any], bias: Tensor, width: int) -> dict[str, Any]:
    """An attention's arguments with another bias, as each family hands it over."""
    if "position_bias" in given:  # MPT: (h 1 keys), the same for all rows
        return {"position_bias": bias[0]}
    if given["alibi"].dim() == 3:  # BLOOM: (b · h 1 keys)
        rows = given["alibi"].shape[0] // bias.shape[1]
        return {"alibi": bias.expand(rows, -1, -1, -1).flatten(0, 1)}
    mask = given["attention_mask"]  # Falcon-RW: by itself, and scaled in the mask
    hidden = mask == torch.finfo(mask.dtype).min
    scaled = (bias / math.sqrt(width)).to(mask.dtype)
    return {
        "alibi": bias.expand(mask.shape[0], -1, -1, -1),
        "attention_mask": torch.where(hidden, mask, scaled),
    }


def _bloom(model: Any, length: int, dtype: torch.dtype) -> Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, length, dtype=torch.long)
    return build_alibi_tensor(mask, model.config.num_attention_heads, dtype)[:, 0]


def _falcon(model: Any, length: int, dtype: torch.dtype) -> Tensor:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    mask = torch.ones(1, length, dtype=torch.long)
    return build_alibi_tensor(mask, model.config.num_attention_heads, dtype)[:, 0]


def _mpt(model: Any, length: int, dtype: torch.dtype) -> Tensor:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    return build_mpt_alibi_tensor(model.config.num_attention_heads, length)[:, 0]


ALIBI: dict[Any, tuple[Table, str, str]] = {
    BLOOM: (_bloom, "bloom", "BloomAttention"),
    FALCON_RW: (_falcon, "falcon", "FalconAttention"),
    MPT: (_mpt, "mpt", "MptAttention"),
}


Spans = Sequence[tuple[int, int, int]]  # (row, from, to): tokens of a row


def movable(model: nn.Module) -> bool:
    """Whether a model's cache holds nothing but keys and values, as they were made."""
    layers = DynamicCache(config=model.config).layers  # type: ignore[arg-type]
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return patch_of(model) is None and all(type(layer) in kinds for layer in layers)


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
        raise UserError(
            "windows are joined in a cache of keys and values alone, and this model's holds more: "
            "read it with nbce, or without a patch."
        )
    return [(layer.keys, layer.values) for layer in cache.layers]
