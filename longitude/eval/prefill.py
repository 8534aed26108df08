"""Reading a long text through a live model, in memory that grows with its length and no faster.

One forward without a cache where its activations fit: transformers then runs plain causal attention
and makes no mask. A longer text goes in chunks through the model's cache. The head makes the last
token's logits alone; what it was given is kept beside them, for whoever wants others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.validate import UserError, shown

ROOM = 2**31  # bytes that the activations of one forward may take
LEAST = 128  # tokens of a chunk, however long the text is
LOGITS = 2**25  # logits at once
STRETCH = 2**11  # tokens at once through the head
WINDOWS = ("sliding_window", "attention_chunk_size")  # layers with these take a mask on every call
SAMPLE = 4  # tokens on which the head is tried


@dataclass(frozen=True, eq=False)
class Head:
    """What makes logits of what comes out of a model's last layer. Without a module there is none
    to be found, and the model's own logits stand in for both."""

    module: nn.Module | None
    finish: Callable[[Tensor], Tensor]

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n vocabulary"]:
        return self.finish(x if self.module is None else self.module(x)).float()


@dataclass(frozen=True, eq=False)
class Read:
    """Some tokens that were read, those from `first` on: what the head gets for each, the logits
    after the last one, and the cache to read on with."""

    first: int
    hidden: Float[Tensor, "b n d"]
    said: Float[Tensor, "b vocabulary"]
    cache: Any


@torch.no_grad()
def reads(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    *,
    chunk: int | None = None,
    keep: bool = False,
    head: Head | None = None,
) -> Iterator[Read]:
    """Read rows of tokens from their beginning, `chunk` at a time (without it: as many as fit).

    Args:
        keep: hand out a cache also where one forward reads everything.
        head: `head_of(model)`, where it is at hand.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"a chunk is 1 token or more, but got {shown(chunk)}: use 2048.")
    head = head_of(model) if head is None else head
    total = ids.shape[1]
    chunk = chunk_for(model, ids.shape[0], total, head) if chunk is None else chunk
    cache, first = None, 0
    for part in ids.to(place_of(model)).split(chunk, 1):
        read = forward(model, part, head, cache=cache, keep=keep or chunk < total, first=first)
        yield read
        cache, first = read.cache, first + part.shape[1]


@torch.no_grad()
def forward(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    head: Head,
    *,
    cache: Any = None,
    keep: bool = True,
    first: int = 0,
) -> Read:
    """One forward. A model without a cache makes its own, so that a patch can take it over."""
    more = {"past_key_values": cache} if cache is not None else {}
    with _overheard(head.module) as heard:
        out: Any = model(input_ids=ids, use_cache=keep, **more)
    if keep and getattr(out, "past_key_values", None) is None:
        raise UserError(
            f"{type(model).__name__} keeps no cache, so it can't read a text of this length in "
            f"chunks: use a shorter length."
        )
    hidden = heard[-1] if heard else out.logits
    return Read(first, hidden, out.logits[:, -1], out.past_key_values if keep else None)


@contextmanager
def _overheard(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """What a module is given while the context lasts; it goes on with each row's last token."""
    heard: list[Tensor] = []

    def narrow(_: nn.Module, args: tuple[Any, ...]) -> Any:
        heard.append(args[0])
        return (args[0][:, -1:], *args[1:])

    hook = None if module is None else module.register_forward_pre_hook(narrow)
    try:
        yield heard
    finally:
        if hook is not None:
            hook.remove()


# the head

_HEADS: WeakKeyDictionary[nn.Module, Head] = WeakKeyDictionary()


def head_of(model: nn.Module) -> Head:
    """A model's head, tried once on a few tokens against the logits that the model gives itself."""
    if model not in _HEADS:
        found = Head(model.get_output_embeddings(), _finish(model))  # type: ignore[operator]
        _HEADS[model] = found if _tells(model, found) else Head(None, lambda x: x)
    return _HEADS[model]


def _finish(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What families do with their logits: a factor (Cohere), a divisor (Granite), a soft cap
    (Gemma)."""
    config = text_config(model)
    times = getattr(config, "logit_scale", None) or 1.0
    by = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def finish(x: Tensor) -> Tensor:
        x = x if times == by == 1 else x * times / by
        return x if cap is None else torch.tanh(x / cap) * cap

    return finish


@torch.no_grad()
def _tells(model: Any, head: Head) -> bool:
    """Whether the head makes the model's logits."""
    if head.module is None:
        return False
    ids = torch.arange(SAMPLE, device=place_of(model))[None]
    said: Tensor = model(input_ids=ids, use_cache=False).logits.float()
    try:
        made = head(forward(model, ids, head, keep=False).hidden)
    except (IndexError, RuntimeError, TypeError):  # called otherwise, or not with every token
        return False
    close = 1e-4 if model.dtype.itemsize > 2 else 0.05  # bfloat16 rounds
    return made.shape == said.shape and torch.allclose(made, said, rtol=close, atol=close)


# how much at once


def chunk_for(model: nn.Module, rows: int, total: int, head: Head) -> int:
    """How many tokens of a text one forward may read: all, or a half, a quarter … of them."""
    chunk = total
    while chunk > LEAST and _bytes(model, rows, chunk, total) > ROOM:
        chunk = -(-chunk // 2)
    return chunk if head.module is not None else min(chunk, stretch_for(model))


def stretch_for(model: nn.Module) -> int:
    """How many tokens' logits are made at once."""
    return max(1, min(STRETCH, LOGITS // text_config(model).vocab_size))


def _bytes(model: Any, rows: int, tokens: int, total: int) -> int:
    """What the activations of one forward take, roughly: a layer's feed-forward or its heads, which
    come one after the other, and scores or a mask where attention has all of them in memory."""
    config = text_config(model)
    width, heads = config.hidden_size, config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    inner = max(inner) if isinstance(inner, list) else inner or 4 * width
    size, how = model.dtype.itemsize, config._attn_implementation
    pairs = 0
    if how == "sdpa" and (tokens < total or any(getattr(config, w, None) for w in WINDOWS)):
        pairs = 1 + size  # a mask, as booleans and as numbers to add
    elif how == "eager":
        pairs = heads * (4 + 2 * size)  # scores, their softmax in float32, and rounded
    return rows * tokens * (size * max(4 * inner + 2 * width, 12 * width) + pairs * total)


def text_config(model: nn.Module) -> Any:
    """The part of a model's configuration that speaks of text."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def place_of(model: nn.Module) -> torch.device:
    """Where a model wants its tokens."""
    return model.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
