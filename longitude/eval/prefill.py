"""Prefill and greedy decoding with a live model, in memory that grows linearly with the length.

A prompt takes one forward without a cache if its activations fit: transformers then runs plain
causal attention and builds no mask. A longer prompt goes through the model's cache in chunks. The
LM head computes the last token's logits only; its input hidden states are returned with them. If
those of the last tokens suffice, the last layer computes no others, which saves a fifth of the work
in a model of five layers. A model patched over the ranks of a process group runs each rank's tokens
on that rank, in one forward.

Greedy decoding gives the tokens of `generate(do_sample=False)`, without a generation config that
could add a repetition penalty or a minimal length. Prompts of one length run as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, shown
from longitude.hf.families import family_of
from longitude.hf.layer import (
    LAST_ROWS,
    LAYER_STATE,
    NAME,
    Attended,
    LastRows,
    LayerState,
    register,
)
from longitude.hf.model_state import ModelState
from longitude.hf.patch import probed_layers
from longitude.hf.probe import ProbedLayer, attention_implementation, replaced
from longitude.hf.ranks import ranks_of
from longitude.ops.bands import CHUNK_ROWS
from longitude.ops.shards import shard_positions

ACTIVATION_BYTES = 2**31  # upper bound for one forward
MIN_CHUNK = 128  # tokens: no chunk is shorter
LOGITS_AT_ONCE = 2**25
TOKENS_AT_ONCE = 2**11  # through the LM head
BATCH_TOKENS = 2**15  # tokens of the texts in one forward
CPU_BATCH_TOKENS = 2**11  # their activations stay in a core's cache and are not mapped anew
WINDOWS = ("sliding_window", "attention_chunk_size")  # layers with these take a mask on every call
PROBE_TOKENS = 4  # on which the LM head and the last layer are tried


@dataclass(frozen=True, eq=False)
class Head:
    """Maps the last layer's hidden states to logits. `module` is None if no LM head was found: the
    model's own logits then stand in for hidden states and logits."""

    module: nn.Module | None
    finish: Callable[[Tensor], Tensor]

    def __call__(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n vocabulary"]:
        return self.finish(x if self.module is None else self.module(x)).float()


@dataclass(frozen=True, eq=False)
class Chunk:
    """One forward: positions of tokens, ascending, the LM head's input for each of them, the logits
    after the last one, and the cache to continue with. In a process group the tokens are this
    rank's, or with a cache only the last one."""

    pos: Int[Tensor, " n"]
    hidden: Float[Tensor, "b n d"]
    logits: Float[Tensor, "b vocabulary"]
    cache: Any

    @property
    def first(self) -> int:
        return int(self.pos[0])


@torch.no_grad()
def prefill(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    *,
    chunk: int | None = None,
    keep_cache: bool = False,
    head: Head | None = None,
    last: int | None = None,
) -> Iterator[Chunk]:
    """Run rows of tokens from their beginning, `chunk` at a time (default: as many as fit).

    Args:
        keep_cache: return a cache even if a single forward suffices.
        head: `lm_head(model)`, if the caller has it.
        last: how many tokens at the end need hidden states (default: all); those of others may be
            missing.
    """
    if chunk is not None and chunk < 1:
        raise UserError(f"a chunk is 1 token or more, but got {shown(chunk)}: use 2048.")
    head = lm_head(model) if head is None else head
    total = ids.shape[1]
    if chunk is None:
        chunk = chunk_for(model, ids.shape[0], total, head) if ranks_of(model) is None else total
    cache, first, keep = None, 0, keep_cache or chunk < total
    narrow = nullcontext()
    if last is not None and 2 * last <= total and not keep and ranks_of(model) is None:
        if input_device(model).type == "cuda":  # skip whole blocks, to compile no new kernel
            last += (total - last) % CHUNK_ROWS
        narrow = _last_rows_only(model, total, last)
    for part in ids.to(input_device(model)).split(chunk, 1):
        with narrow:
            out = forward(model, part, head, cache=cache, keep_cache=keep, first=first)
        yield out
        cache, first = out.cache, first + part.shape[1]


@torch.no_grad()
def forward(
    model: nn.Module,
    ids: Int[Tensor, "b n"],
    head: Head,
    *,
    cache: Any = None,
    keep_cache: bool = True,
    first: int = 0,
) -> Chunk:
    """Run one forward, with the LM head on each row's last token only. Without `cache` the model
    builds its own, so that a patch can replace it."""
    kwargs = {"past_key_values": cache} if cache is not None else {}
    pos, ranks, mode = torch.arange(first, first + ids.shape[1]), ranks_of(model), nullcontext()
    if ranks is not None and keep_cache:
        mode = ranks.full_prompts()
    elif ranks is not None:
        pos = shard_positions(ids.shape[1], ranks.group, "zigzag")
        ids, kwargs = ids[:, pos], {"position_ids": pos[None].to(ids.device)}
    inputs: list[Tensor] = []

    def last_token(_: nn.Module, args: tuple[Any, ...]) -> Any:
        inputs.append(args[0])
        return (args[0][:, -1:], *args[1:])

    module = head.module
    hook = nullcontext() if module is None else module.register_forward_pre_hook(last_token)
    with hook, mode:
        out: Any = model(input_ids=ids, use_cache=keep_cache, **kwargs)
    if keep_cache and getattr(out, "past_key_values", None) is None:
        raise UserError(
            f"{type(model).__name__} keeps no cache, so it can't read a text of this length in "
            f"chunks: use a shorter length."
        )
    hidden = inputs[-1] if inputs else out.logits
    cache = out.past_key_values if keep_cache else None
    return Chunk(pos[-hidden.shape[1] :], hidden, out.logits[:, -1], cache)


# the last layer

_LAST_LAYERS: WeakKeyDictionary[nn.Module, tuple[nn.Module, ProbedLayer] | None]
_LAST_LAYERS = WeakKeyDictionary()


@contextmanager
def _last_rows_only(model: nn.Module, total: int, last: int) -> Iterator[None]:
    """Have the last layer, if it can, compute the last tokens alone: of all other tokens they need
    only the keys and values."""
    last_layer = _last_layer(model)
    if last_layer is None:
        yield
        return
    layer, probed = last_layer
    run_layer, state = layer.forward, ModelState(probed.owner, None)
    state.forward.pos = range(total)
    rotated = LayerState(probed, Scheme(mask=probed.scheme.mask), state)  # if not patched
    layer_state = getattr(probed.module, LAYER_STATE, rotated)

    def cut(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(map(cut, x))
        by_token = isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == total
        return x[:, -last:] if by_token else x

    def forward(*args: Any, **kwargs: Any) -> Any:
        previous = LAST_ROWS.set(LastRows(last))
        try:
            with attention_implementation(NAME, layer):
                with suppress(Attended):
                    run_layer(*args, **kwargs)
                return run_layer(*cut(args), **{name: cut(x) for name, x in kwargs.items()})
        finally:
            LAST_ROWS.reset(previous)

    with replaced(layer, "forward", forward), replaced(probed.module, LAYER_STATE, layer_state):
        yield


def _last_layer(model: nn.Module) -> tuple[nn.Module, ProbedLayer] | None:
    """The last layer and its probed attention, if the layer can compute its last rows alone; tried
    once per model, on a few tokens."""
    if model not in _LAST_LAYERS:
        _LAST_LAYERS[model] = None  # while the reference forward runs
        with suppress(UserError):
            if family_of(model) is None:
                _LAST_LAYERS[model] = _tried_last_layer(model, probed_layers(model)[-1])
    return _LAST_LAYERS[model]


@torch.no_grad()
def _tried_last_layer(
    model: nn.Module, probed: ProbedLayer
) -> tuple[nn.Module, ProbedLayer] | None:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    layer = next((m[-1] for m in lists if probed.module in m[-1].modules()), None)
    if layer is None or probed.unsupported_reason:
        return None
    head, ids = lm_head(model), torch.arange(PROBE_TOKENS, device=input_device(model))[None]
    expected = forward(model, ids, head, keep_cache=False).hidden[:, -1:]
    register()
    _LAST_LAYERS[model] = layer, probed
    try:
        with _last_rows_only(model, PROBE_TOKENS, 1):
            hidden = forward(model, ids, head, keep_cache=False).hidden
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None  # the layer is called in an unexpected way
    return (layer, probed) if _equal(model, hidden, expected) else None


# greedy decoding


def greedy(
    model: nn.Module, prompt: Int[Tensor, " n"], new: int, stop: Collection[int] | None = None
) -> list[int]:
    """Decode `new` tokens after a prompt greedily, or those before the first one in `stop`
    (default: the model's end-of-text tokens)."""
    return greedy_batch(model, [prompt], new, stop)[0]


def greedy_batch(
    model: nn.Module,
    prompts: Sequence[Int[Tensor, " _"]],
    new: int,
    stop: Collection[int] | None = None,
) -> list[list[int]]:
    """`greedy` for each prompt, in order; prompts of the same length share a forward."""
    if new < 1 or not all(len(prompt) for prompt in prompts):
        raise UserError(
            f"an answer is 1 token or more behind a prompt of 1 or more, but got {shown(new)} and "
            f"prompts of {shown([len(prompt) for prompt in prompts])}: give more."
        )
    ends = eos_tokens(model) if stop is None else set(stop)
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    answers: dict[int, list[int]] = {}
    for length, indices in by_length.items():
        rows = batch_rows(model, length + new)
        for first in range(0, len(indices), rows):
            batch = indices[first : first + rows]
            tokens = _decode(model, torch.stack([prompts[i] for i in batch]), new, ends)
            answers |= zip(batch, tokens, strict=True)
    return [answers[index] for index in range(len(prompts))]


def eos_tokens(model: nn.Module) -> set[int]:
    """The tokens with which a model ends a text."""
    settings = getattr(model, "generation_config", None) or getattr(model, "config", None)
    ends = getattr(settings, "eos_token_id", None)
    return {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}


@torch.no_grad()
def _decode(model: nn.Module, batch: Tensor, new: int, ends: set[int]) -> list[list[int]]:
    """Decode the rows of a batch together until each has ended."""
    *_, state = prefill(model, batch, keep_cache=True)
    tokens, ended = [], torch.zeros(len(batch), dtype=torch.bool)
    while True:
        tokens.append(state.logits.argmax(-1))
        ended |= torch.isin(tokens[-1].cpu(), torch.tensor(sorted(ends), dtype=torch.long))
        if len(tokens) == new or ended.all():
            rows = torch.stack(tokens, 1).tolist()
            return [list(takewhile(lambda token: token not in ends, row)) for row in rows]
        state = decode_step(model, tokens[-1], state)


def decode_step(model: nn.Module, token: Int[Tensor, " b"], state: Chunk) -> Chunk:
    """Append one token to each row."""
    return forward(model, token[:, None], lm_head(model), cache=state.cache)


# the LM head

_HEADS: WeakKeyDictionary[nn.Module, Head] = WeakKeyDictionary()


@torch.no_grad()
def lm_head(model: nn.Module) -> Head:
    """A model's LM head, checked once on a few tokens against the logits of the model itself."""
    if model in _HEADS:
        return _HEADS[model]
    config = text_config(model)  # a factor (Cohere), a divisor (Granite), a soft cap (Gemma)
    factor = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)

    def finish(x: Tensor) -> Tensor:
        x = x if factor == divisor == 1 else x * factor / divisor
        return x if cap is None else torch.tanh(x / cap) * cap

    head = Head(model.get_output_embeddings(), finish)  # type: ignore[operator]
    usable = Head(None, lambda x: x)
    if head.module is not None:
        ids = torch.arange(PROBE_TOKENS, device=input_device(model))[None]
        expected: Tensor = model(input_ids=ids, use_cache=False).logits.float()
        with suppress(IndexError, RuntimeError, TypeError):  # called in another way
            if _equal(model, head(forward(model, ids, head, keep_cache=False).hidden), expected):
                usable = head
    _HEADS[model] = usable
    return usable


def _equal(model: Any, found: Tensor, expected: Tensor) -> bool:
    """Whether two outputs agree up to the rounding of the model's dtype."""
    tolerance = 1e-4 if model.dtype.itemsize > 2 else 0.05
    same_shape = found.shape == expected.shape
    return same_shape and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


# sizes


def chunk_for(model: nn.Module, rows: int, total: int, head: Head) -> int:
    """How many tokens of a text one forward may take: all, or a half, a quarter … of them."""
    chunk = total
    while chunk > MIN_CHUNK and activation_bytes(model, rows, chunk, total) > ACTIVATION_BYTES:
        chunk = -(-chunk // 2)
    return chunk if head.module is not None else min(chunk, logit_chunk(model))


def batch_rows(model: nn.Module, length: int) -> int:
    """How many texts of this length go through one forward together."""
    tokens = CPU_BATCH_TOKENS if input_device(model).type == "cpu" else BATCH_TOKENS
    return max(1, tokens // length)


def logit_chunk(model: nn.Module) -> int:
    """How many tokens' logits are computed at once."""
    return max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // text_config(model).vocab_size))


def activation_bytes(model: Any, rows: int, tokens: int, total: int) -> int:
    """Estimate the activations of one forward: a layer's feed-forward or its heads, whichever is
    larger, and scores or a mask if attention materialises them."""
    config = text_config(model)
    width, heads, inner = config.hidden_size, config.num_attention_heads, inner_size(config)
    size, backend = model.dtype.itemsize, config._attn_implementation
    pairs = 0
    if backend == "sdpa" and (tokens < total or any(getattr(config, w, None) for w in WINDOWS)):
        pairs = 1 + size  # a mask, as booleans and as numbers to add
    elif backend == "eager":
        pairs = heads * (4 + 2 * size)  # scores, their softmax in float32, and rounded
    return rows * tokens * (size * max(4 * inner + 2 * width, 12 * width) + pairs * total)


def inner_size(config: Any) -> int:
    """The width of a layer's feed-forward; the largest, if layers differ."""
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    return max(inner) if isinstance(inner, list) else inner or 4 * config.hidden_size


def text_config(model: nn.Module) -> Any:
    """A model's configuration, or that of its text part if it has several."""
    return model.config.get_text_config()  # type: ignore[operator, union-attr]


def input_device(model: nn.Module) -> torch.device:
    """The device of a model's input embeddings."""
    return model.get_input_embeddings().weight.device  # type: ignore[operator, union-attr]
