"""Forward passes at given positions, and KV caches of many rows: shared heads, padding, groups.

A head is the start of a prompt that rows share. Rotary and learned positions enter as
`position_ids`. ALiBi has none: transformers computes its bias from indices into the cache, so a
hook passes each attention module the model's bias at the actual positions of its keys.

Keys and values can be rearranged only in caches that hold nothing else: transformers' dynamic
layers. A cache of another kind (linear attention's states, a patch's layers) is used unchanged.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from longitude.core.validate import UserError, short
from longitude.eval.prefill import chunk_for, input_device, lm_head
from longitude.hf.families import family_of
from longitude.hf.families.alibi import BLOOM, FALCON_RW, MPT, attentions
from longitude.hf.patch import patch_of

MAX_TOKENS = 2**14  # of rows that are prefilled together
ALIBI: dict[Any, str] = {BLOOM: "BloomAttention", FALCON_RW: "FalconAttention", MPT: "MptAttention"}


@torch.no_grad()
def forward(
    model: Any,
    ids: Int[Tensor, "b n"],
    at: Int[Tensor, "b n"],
    cache: Any,
    *,
    mask: Int[Tensor, "b keys"] | None = None,
    keys: Int[Tensor, "#b keys"] | None = None,
    head: bool = False,
) -> Float[Tensor, "b _"]:
    """Run tokens at positions `at` and append them to a cache. Return the last token's logits, or
    without the LM `head` its hidden state. `mask` covers the cache too and is 0 for padding; `keys`
    are the positions of all keys, with those of these tokens, if they are not 0, 1, 2, …."""
    model = model if head else getattr(model, "base_model", model)
    names = inspect.signature(model.forward).parameters
    inputs = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    inputs |= {"logits_to_keep": 1} if head and "logits_to_keep" in names else {}
    inputs |= {"position_ids": at} if "position_ids" in names else {}
    inputs |= {} if mask is None else {"attention_mask": mask}
    with _alibi_at(model, keys):
        try:
            last = model(**inputs)[0][:, -1]
        except (TypeError, ValueError) as error:  # it takes another kind of cache or arguments
            raise UserError(
                f"{type(model).__name__} can't read a text in windows "
                f"({short(str(error), 120)}): use another model."
            ) from error
    return last.to(torch.promote_types(last.dtype, torch.float32))


def prefill(
    model: nn.Module, rows: Sequence[Sequence[int]], starts: Sequence[int], head: Any = None
) -> Any:
    """Return the cache of rows that start at these positions, each after the tokens of `head`, a
    cache of one row. As many tokens as fit run at a time. Padding comes last, where a causal model
    does not see it."""
    cache, shared = empty_cache(model), 0
    if head is not None:
        cache, shared = copy.deepcopy(head), head.get_seq_length()
        cache.batch_repeat_interleave(len(rows))
    device, longest = input_device(model), [*max(rows, key=len)]
    # padded with a token of the text: some models warn of the padding token
    padded = [[*row, *longest[-1:] * (len(longest) - len(row))] for row in rows]
    ids = torch.tensor(padded, device=device)
    pos = torch.tensor(starts, device=device)[:, None] + torch.arange(len(longest), device=device)
    head_positions = torch.arange(shared, device=device).expand(len(rows), -1)
    shifted = any(start != shared for start in starts)
    chunk = max(1, chunk_for(model, *ids.shape, lm_head(model)))  # type: ignore[misc]
    for first in range(0, len(longest), chunk):
        stop = first + chunk
        keys = torch.cat([head_positions, pos[:, :stop]], 1) if shifted else None
        forward(model, ids[:, first:stop], pos[:, first:stop], cache, keys=keys)
    return cache


def group_rows(
    rows: Sequence[Sequence[int]], max_tokens: int, same_length: bool = False
) -> list[list[int]]:
    """Group the indices of rows of similar (or the same) length, at most `max_tokens` per group."""
    groups: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda n: -len(rows[n])):
        longest = len(rows[groups[-1][0]]) if groups else 0
        fits = groups and (len(groups[-1]) + 1) * longest <= max_tokens
        if fits and (not same_length or len(rows[index]) == longest):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@contextmanager
def _alibi_at(model: Any, keys: Tensor | None) -> Iterator[None]:
    """Give ALiBi models the bias of these key positions, inside the block; others are unchanged."""
    family: Any = None if keys is None else family_of(model)
    if keys is None or family not in ALIBI:
        yield
        return
    heads, length = model.config.num_attention_heads, int(keys.max()) + 1
    modeling = import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    if family is MPT:
        table = modeling.build_mpt_alibi_tensor(heads, length)[:, 0]
    else:
        ones = torch.ones(1, length, dtype=torch.long)
        table = modeling.build_alibi_tensor(ones, heads, model.dtype)[:, 0]
    bias = table.to(keys.device)[:, keys].transpose(0, 1)[:, :, None]  # (b h 1 keys)

    def replace_bias(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if family is MPT:  # (h 1 keys), the same for all rows
            return args, kwargs | {"position_bias": bias[0]}
        if family is BLOOM:  # (b · h 1 keys)
            rows = kwargs["alibi"].shape[0] // heads
            return args, kwargs | {"alibi": bias.expand(rows, -1, -1, -1).flatten(0, 1)}
        mask = kwargs["attention_mask"]  # Falcon-RW: as an argument, and scaled in the mask
        hidden = mask == torch.finfo(mask.dtype).min
        scaled = (bias / math.sqrt(getattr(module, "head_dim", 1))).to(mask.dtype)
        both = {"alibi": bias.expand(mask.shape[0], -1, -1, -1)}
        return args, kwargs | both | {"attention_mask": torch.where(hidden, mask, scaled)}

    with ExitStack() as hooks:
        for module in attentions(model, family.name, ALIBI[family]):
            hook = module.register_forward_pre_hook(replace_bias, with_kwargs=True)
            hooks.enter_context(hook)
        yield


# caches


def layer_types(model: Any) -> set[type]:
    """Return the classes of layers that a model's default cache has."""
    return {type(layer) for layer in DynamicCache(config=model.config).layers}


def movable(model: nn.Module) -> bool:
    """Whether a model's cache holds nothing but keys and values, as they were computed."""
    plain = {DynamicLayer, DynamicSlidingWindowLayer}
    return patch_of(model) is None and layer_types(model) <= plain


def empty_cache(model: Any) -> Any:
    """Return an empty cache. A movable one stores every token, also in layers whose mask hides
    distant ones: which ones these are depends on the padding, which is not known yet."""
    return DynamicCache() if movable(model) else DynamicCache(config=model.config)


@dataclass(eq=False)
class _Group:
    """Rows that run together: their tokens after the shared head."""

    indices: list[int]
    rows: list[list[int]]
    cache: Any = None
    lengths: list[int] = field(default_factory=list)  # tokens of each row in the cache


class Rows:
    """Several rows of one model that continue with the same tokens, each with its own cache.

    The head that all rows share is prefilled once and its cache repeated. The rest, up to each
    row's last token, is prefilled with padding on the right; then the padding is moved to the left,
    and every further token is one forward pass over a column. If a cache isn't movable, rows of the
    same length run together instead. Caches beyond `room` bytes are dropped, and their rows are
    prefilled again for each token.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Sequence[int]],
        *,
        at_once: int = MAX_TOKENS,
        room: int | None = None,
    ) -> None:
        self.model, self.room = model, room
        self.continued: list[int] = []  # the tokens that all rows continued with
        self.cached = 0  # bytes of all caches
        self.movable, self.shared = movable(model), 0
        if self.movable and len(rows) > 1:
            common = takewhile(lambda column: len({*column}) == 1, zip(*rows, strict=False))
            self.shared = min(sum(1 for _ in common), min(map(len, rows)) - 1)
        self.head = prefill(model, [rows[0][: self.shared]], [0]) if self.shared else None
        rest = [list(row[self.shared :]) for row in rows]
        indices = group_rows(rest, at_once, same_length=not self.movable)
        self.groups = [_Group(group, [rest[n] for n in group]) for group in indices]

    def __call__(self, token: int | None) -> Float[Tensor, "rows v"]:
        """The logits after each row's last token (None), or after one more token in every row."""
        self.continued += [] if token is None else [token]
        logits: dict[int, Tensor] = {}
        for group in self.groups:
            if group.cache is None:
                values = self._open(group)
            else:
                values = self._column(group, self.continued[-1:] * len(group.rows))
            logits |= zip(group.indices, values, strict=True)
        return torch.stack([logits[n] for n in sorted(logits)])

    def _open(self, group: _Group) -> Tensor:
        """Prefill all but the rows' last tokens, run these, and keep the cache if there is room."""
        rows = [row + self.continued for row in group.rows]
        lengths = [len(row) - 1 for row in rows]
        prefixes, longest = [row[:-1] for row in rows], max(lengths)
        group.cache = prefill(self.model, prefixes, [self.shared] * len(rows), self.head)
        group.lengths = [self.shared + n for n in lengths]
        if self.movable and min(lengths) < longest:
            for layer in group.cache.layers:  # padding moves from the right to the left
                for name in ("keys", "values"):
                    pairs = zip(getattr(layer, name), lengths, strict=True)
                    moved = torch.stack([x.roll(longest - n, 1) for x, n in pairs])
                    setattr(layer, name, moved)
        logits = self._column(group, [row[-1] for row in rows])
        layers = group.cache.layers
        tensors = [getattr(layer, x, None) for layer in layers for x in ("keys", "values")]
        size = sum(x.nbytes for x in tensors if isinstance(x, Tensor))
        if self.room is not None and self.cached + size > self.room:
            group.cache = None
        else:
            self.cached += size
        return logits

    def _column(self, group: _Group, tokens: list[int]) -> Tensor:
        """Run one token of each row, and return the logits."""
        device, longest = input_device(self.model), max(group.lengths) + 1
        lengths = torch.tensor(group.lengths, device=device)[:, None]
        mask = None
        if min(group.lengths) < max(group.lengths):
            columns = torch.arange(longest, device=device)
            mask = (columns >= longest - 1 - lengths).long()
        ids = torch.tensor(tokens, device=device)[:, None]
        logits = forward(self.model, ids, lengths, group.cache, mask=mask, head=True)
        group.lengths = [n + 1 for n in group.lengths]
        return logits
