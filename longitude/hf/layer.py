"""The attention of patched models: one function that transformers calls under one name.

transformers passes the queries and keys of every attention module to the function registered under
its configuration's `_attn_implementation`. Ours looks up the module's `LayerState`, which holds its
scheme. A module without one (cross-attention, whose keys have no positions) keeps SDPA. The mask
function registered under the same name passes only the padding on: the scheme has its own mask.

A batch is split into runs of tokens at consecutive positions: a row's real tokens beside its
padding, and each document packed into a row. Attention over a run is attention over a range, the
fast path, and other rows and documents can't affect it. Equal runs are batched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int, Real
from torch import Tensor, nn

from longitude.core.part import Pos, as_rows
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops.attention import attention
from longitude.parts import Rope

if TYPE_CHECKING:
    from longitude.hf.model_state import ModelState
    from longitude.hf.probe import ProbedLayer

NAME = "longitude"  # must not contain "sdpa" or "flex_attention": transformers checks for those
NOT_OURS = ("indices", "block_indices", "position_bias")  # arguments of sparse or biased attention
# the attribute of a patched model's modules (a LayerState or None) and of its caches (a `Held`)
LAYER_STATE = "_longitude"
FOREIGN: Any = object()  # stands for the state of a module of an unpatched model
# set by a probe, which records calls instead: (module, query, key, value, mask, the first argument
# from NOT_OURS that was passed) -> the attention output
RECORDER: ContextVar[Callable[..., Tensor] | None] = ContextVar("RECORDER", default=None)


class Uncopied:
    """State of a patched model: a copy of the model would share it, a pickle would lose it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UserError(
            "a patched model can't be copied or pickled, nor its caches pickled: undo the patch "
            "first, and patch the copy."
        )


@dataclass(eq=False)
class LastRows:
    """Computation of a layer for its last `count` tokens only. The layer runs on all tokens up to
    its attention, then on the last tokens, with the attention output `out` (b n h d)."""

    count: int
    out: Tensor | None = None


class Attended(Exception):
    """Raised after attention, to end the first of the two calls that `LastRows` makes."""


LAST_ROWS: ContextVar[LastRows | None] = ContextVar("LAST_ROWS", default=None)


@dataclass(frozen=True, eq=False)
class TokenRun:
    """Tokens at increasing positions in one document, in all rows of the batch that share them."""

    rows: list[int]
    tokens: slice | Tensor
    pos: Pos

    def of(self, x: Tensor) -> Tensor:
        """Return these rows and tokens of x (b h n d)."""
        return x[self.rows][:, :, self.tokens]


def as_range(ids: Int[Tensor, "b n"]) -> range | None:
    """Return the positions as a range if they are consecutive and equal in all rows, else None."""
    if ids.shape[1] == 1:  # a decoding step, where each operation counts
        first, *others = set(ids.flatten().tolist())
        return None if others else range(first, first + 1)
    ids = ids.cpu()  # one device synchronisation, and no launches
    pos = range(first := int(ids[0, 0]), first + ids.shape[1])
    return pos if torch.equal(ids, as_rows(pos, ids.device).to(ids.dtype).expand_as(ids)) else None


def token_runs(pos: Real[Tensor, "b n"], padding: Bool[Tensor, "b n"] | None) -> list[TokenRun]:
    """Split the real tokens of a batch into runs. A run ends where the position does not increase,
    since another document begins there."""
    rows_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    real = torch.ones_like(pos, dtype=torch.bool) if padding is None else ~padding
    for row, (at, is_real) in enumerate(zip(pos.tolist(), real.tolist(), strict=True)):
        tokens = [i for i, flag in enumerate(is_real) if flag]
        splits = [k for k, (i, j) in enumerate(pairwise(tokens), 1) if at[j] <= at[i]]
        for a, b in pairwise([0, *splits, len(tokens)]):
            if a < b:
                run = tuple(tokens[a:b])
                rows_of.setdefault((run, tuple(at[i] for i in run)), []).append(row)

    def compact(values: tuple[Any, ...]) -> Pos:
        first, last = values[0], values[-1]
        if isinstance(first, int) and last - first == len(values) - 1:
            return range(first, last + 1)
        dtype = torch.int64 if isinstance(first, int) else torch.float64
        return torch.tensor(values, dtype=dtype).to(pos.device)

    runs = [(rows, compact(tokens), compact(at)) for (tokens, at), rows in rows_of.items()]
    return [
        TokenRun(rows, slice(run.start, run.stop) if isinstance(run, range) else run, at)
        for rows, run, at in runs
    ]


def all_but_last(runs: list[TokenRun], pos: Real[Tensor, "b n"]) -> Bool[Tensor, "b n"] | None:
    """Mark all tokens except each row's last document, the only one that later tokens continue.
    Return None if no row has several documents: then the cache's padding is enough."""
    rows = [row for run in runs for row in run.rows]
    if len(set(rows)) == len(rows):
        return None
    others, indices = torch.ones_like(pos, dtype=torch.bool), range(pos.shape[1])
    ends = [indices[t][-1] if isinstance(t := run.tokens, slice) else int(t[-1]) for run in runs]
    for _, run in sorted(zip(ends, runs, strict=True), key=lambda each: each[0]):
        outside = torch.ones(pos.shape[1], dtype=torch.bool, device=pos.device)
        outside[run.tokens] = False
        others[run.rows] = outside
    return others


def tokens_of(given: dict[str, Any]) -> Tensor:
    """Return the ids (b n) or embeddings (b n d) of a forward's tokens."""
    ids = given.get("input_ids")
    return given["inputs_embeds"] if ids is None else ids


def padding_of(mask: Any) -> Tensor | None:
    """Return which tokens (b n) a forward's attention mask marks as padding; None if none."""
    if isinstance(mask, dict):  # precomputed masks, one per layer type
        mask = next((entry for entry in mask.values() if entry is not None), None)
    if mask is None:
        return None
    if mask.dim() == 4:
        if mask.shape[1:3] != (1, 1) or mask.dtype != torch.bool:
            raise UserError(
                f"a patched model makes its mask from its scheme, but got one of "
                f"{tuple(mask.shape)}: give attention_mask as (batch, tokens), 0 for padding."
            )
        mask = mask[:, 0, 0]
    padding = ~mask.bool()
    return padding if bool(padding.any()) else None


@dataclass(eq=False)
class LayerState:
    """A patched attention module: its probe result, its scheme, and its model's state."""

    probed: ProbedLayer
    scheme: Scheme
    model: ModelState
    active: bool = True  # until the patch is undone

    def alike(self, one: int, other: int) -> bool:
        """Whether two total lengths give the same rotation."""
        rope, dim = self.scheme.rotary or Rope(), self.probed.rotary_dim
        at = [rope.frequencies.inv_freq(dim, rope.base, n) for n in (one, other)]
        return torch.equal(*at) and rope.frequencies.gain(one) == rope.frequencies.gain(other)

    def rotary_first(self, x: Tensor) -> Tensor:
        """Move the rotary dimensions of heads to the front, where a scheme expects them."""
        a, b = self.probed.rotary_start, self.probed.rotary_start + self.probed.rotary_dim
        return torch.cat([x[..., a:b], x[..., :a], x[..., b:]], -1) if a else x

    def new_tokens(self, x: Tensor) -> Tensor:
        """Bring queries or keys of this forward's tokens into the form that a scheme expects."""
        return self.model.rotated_left(self.rotary_first(x), self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Attend to the tokens of this forward, or of its cache if that holds earlier ones."""
        forward, tokens, last = self.model.forward, q.shape[2], LAST_ROWS.get()
        q = self.new_tokens(q if last is None else q[:, :, -last.count :])
        if forward.past == 0:  # a static cache returns its empty slots as well
            if k.shape[2] > tokens:
                k, v = k[:, :, :tokens], v[:, :, :tokens]
            k = self.new_tokens(k)
            if forward.sharded and self.model.ranks is not None:
                options |= {"key_padding": forward.new_padding, "length": forward.length}
                ranks, pos = self.model.ranks, forward.pos
                options["segments"] = None if ranks.generating else ranks.segments
                options |= {"group": forward.group, "split": ranks.split}
                return attention(self.scheme, q, k, v, pos, pos, **options)
            if forward.runs is None:
                pos, options["length"] = forward.pos, forward.length
                q_pos = pos if q.shape[2] == k.shape[2] else pos[k.shape[2] - q.shape[2] :]
                return attention(self.scheme, q, k, v, q_pos, pos, **options)
            out = q.new_zeros(*q.shape[:3], v.shape[-1])
            for run in forward.runs:
                length = forward.length
                length = length[run.rows] if isinstance(length, Tensor) else length
                heads = (run.of(q), run.of(k), run.of(v))
                run_out = attention(self.scheme, *heads, run.pos, run.pos, length=length, **options)
                rows = torch.tensor(run.rows, device=q.device)[:, None]
                columns = torch.arange(q.shape[2], device=q.device)[run.tokens]
                out.transpose(1, 2)[rows, columns] = run_out.transpose(1, 2)
            return out
        store = self.model.store(self.probed.index)
        if store is not None:
            if self.model.ranks is not None:
                options |= {"group": forward.group, "split": "keys"}
            return store.attend(q, forward.pos, **options)
        used, k_pos, padding = self.model.cached_keys(k.shape[2], self.scheme)
        k, v = self.rotary_first(k)[:, :, used], v[:, :, used]
        options |= {"key_padding": padding, "length": forward.length}
        return attention(self.scheme, q, k, v, forward.pos, k_pos, **options)


def register() -> None:
    """Register attention and mask function; without the latter transformers drops padding."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: heads come in as (b h n d) and go out as (b n h d)."""
    recorder, layer, last = RECORDER.get(), getattr(module, LAYER_STATE, FOREIGN), LAST_ROWS.get()
    if last is not None and last.out is not None:
        return last.out, None
    if recorder is not None:
        extra = next((name for name in NOT_OURS if more.get(name) is not None), None)
        out = recorder(module, query, key, value, attention_mask, extra)
    elif layer is FOREIGN:
        raise UserError(
            f"{type(module).__name__} belongs to a model that shares its configuration with a "
            f"patched one, and would attend without positions: build it from a copy of the "
            f"configuration (copy.deepcopy)."
        )
    elif layer is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs = {"dropout": dropout, "scaling": scaling, "is_causal": False}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[return-value]
    else:
        options = {
            "scale": scaling, "dropout": dropout, "softcap": more.get("softcap"),
            "sink_logits": more.get("s_aux"),
        }  # fmt: skip
        heads, device = (query, key, value), query.device.type
        if torch.is_autocast_enabled(device):
            # cast as autocast does for transformers' own attention: rotating by float32 cosines has
            # left queries and keys wider than values. Our accumulation stays in float32
            heads = [x.to(torch.get_autocast_dtype(device)) for x in heads]
            with torch.autocast(device, enabled=False):
                out = layer.attend(*heads, options)
        else:
            out = layer.attend(*heads, options)
        if last is not None:
            last.out = out.transpose(1, 2).contiguous()
            raise Attended
    return out.transpose(1, 2).contiguous(), None


def padding_mask(*, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
    """The registered mask function: return which keys are real (b 1 1 n), or None.

    For a probe, return a mask that hides nothing and carries the requested mask function and size.
    """
    if RECORDER.get() is None:
        return None if attention_mask is None else attention_mask[:, None, None, :]
    n = (int(more["q_length"]), int(more["kv_length"]))
    mask = torch.ones(more["batch_size"], 1, *n, dtype=torch.bool, device=more.get("device"))
    mask.mask_request = (more["mask_function"], more.get("local_size"))  # type: ignore[attr-defined]
    return mask
