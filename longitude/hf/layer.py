"""Runs of consecutive tokens: what left padding and packing leave of a batch.

A row's real tokens, and each document packed into a row, stand at consecutive positions. Attention
over a run is attention over a range, the fast way, and what another row or document holds can't
touch it. Rows that look alike run together.

The attention of patched models: one function that transformers knows by one name.

transformers hands every attention module's queries and keys to the function registered under its
configuration's name. Ours looks for the module's seat, which holds its scheme. A module without one
(cross-attention: its keys have no positions) keeps transformers' own attention. The mask function
under the same name hands the padding through and leaves the shape to the scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from longitude.core.part import Pos
from longitude.core.scheme import Scheme
from longitude.ops.attention import attention

if TYPE_CHECKING:
    from longitude.hf.model_state import ModelState


@dataclass(frozen=True, eq=False)
class TokenRun:
    """Some tokens of some rows, with their positions."""

    rows: list[int]
    tokens: slice | Tensor
    pos: Pos

    def of(self, x: Tensor) -> Tensor:
        """These rows and tokens of x (b h n d)."""
        return x[self.rows][:, :, self.tokens]


def as_range(ids: Int[Tensor, "b n"]) -> range | None:
    """The positions as a range, where they are consecutive and every row's are the same."""
    n = ids.shape[1]
    same = (ids == ids[:1, :1] + torch.arange(n, device=ids.device)).all()
    first, alike = torch.stack([ids[0, 0], same.long()]).tolist()  # one look at the device
    return range(first, first + n) if alike else None


def token_runs(pos: Int[Tensor, "b n"], hidden: Bool[Tensor, "b n"] | None) -> list[TokenRun]:
    """The runs of a batch: real tokens only, cut where a position does not grow."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    shown = torch.ones_like(pos, dtype=torch.bool) if hidden is None else ~hidden
    for row, (at, real) in enumerate(zip(pos.tolist(), shown.tolist(), strict=True)):
        tokens = [i for i, is_real in enumerate(real) if is_real]
        for run in _cut(tokens, at):
            found.setdefault((tuple(run), tuple(at[i] for i in run)), []).append(row)
    return [
        TokenRun(rows, _as_slice(run, pos.device), _as_pos(at, pos.device))
        for (run, at), rows in found.items()
    ]


def _cut(tokens: list[int], at: list[int]) -> list[list[int]]:
    """Tokens in runs of growing positions: where one does not grow, another document begins."""
    ends = [k for k, (i, j) in enumerate(pairwise(tokens), 1) if at[j] <= at[i]]
    bounds = [0, *ends, len(tokens)]
    return [tokens[a:b] for a, b in pairwise(bounds) if a < b]


def _consecutive(values: tuple[int, ...]) -> bool:
    return values[-1] - values[0] == len(values) - 1


def _as_slice(run: tuple[int, ...], device: torch.device) -> slice | Tensor:
    return slice(run[0], run[-1] + 1) if _consecutive(run) else torch.tensor(run, device=device)


def _as_pos(at: tuple[int, ...], device: torch.device) -> Pos:
    return range(at[0], at[-1] + 1) if _consecutive(at) else torch.tensor(at, device=device)


NAME = "longitude"  # neither "sdpa" nor "flex_attention" in it: transformers would check for those
LAYER_STATE = "_longitude"
# a probe that watches instead: (module, query, key, value, mask) -> what attention gives
RECORDER: ContextVar[Callable[..., Tensor] | None] = ContextVar("WATCHED", default=None)


def register() -> None:
    """Make transformers know the name, with its mask function: without one, padding is dropped."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_mask)


@dataclass(eq=False)
class LayerState:
    """One attention module's place: its scheme, its layer, where in a head the rotary part is."""

    trunk: ModelState
    layer: int
    scheme: Scheme
    before: int = 0  # dimensions of a head that stand before the rotary ones
    width: int = 0  # how many those are
    kept: bool = True  # a cache holds the very keys attention gets: ours can take its place
    active: bool = True  # until the patch is undone

    def front(self, x: Tensor) -> Tensor:
        """Heads with their rotary dimensions first, as a scheme has them."""
        if not self.before:
            return x
        a, b = self.before, self.before + self.width
        return torch.cat([x[..., a:b], x[..., :a], x[..., b:]], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention over what this forward or its cache holds."""
        trunk, tokens = self.trunk, q.shape[2]
        q = self.front(q)
        if trunk.past == 0:  # a static cache hands out its empty places as well
            k, v = self.front(k)[:, :, :tokens], v[:, :, :tokens]
            return _by_pieces(self.scheme, q, k, v, trunk, options)
        store = trunk.store(self.layer)
        if store is not None:
            return store.attend(q, trunk.pos, **options)
        taken, k_pos, hidden = trunk.keys(k.shape[2], self.scheme)
        k, v = self.front(k)[:, :, taken], v[:, :, taken]
        options |= {"key_padding": hidden, "length": trunk.length}
        return attention(self.scheme, q, k, v, trunk.pos, k_pos, **options)


def _by_pieces(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, trunk: ModelState, options: dict[str, Any]
) -> Tensor:
    """Attention of tokens among themselves, run by run."""
    if trunk.pieces is None:
        return attention(scheme, q, k, v, trunk.pos, trunk.pos, length=trunk.length, **options)
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    for piece in trunk.pieces:
        length = trunk.length
        if isinstance(length, Tensor):
            length = length[piece.rows]
        part = attention(
            *(scheme, piece.of(q), piece.of(k), piece.of(v), piece.pos, piece.pos),
            **options,
            length=length,
        )
        rows = torch.tensor(piece.rows, device=q.device)[:, None]
        index = torch.arange(q.shape[2], device=q.device)[piece.tokens]
        out.transpose(1, 2)[rows, index] = part.transpose(1, 2)
    return out


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
    """What transformers calls: heads come in as (b h n d) and go out as (b n h d)."""
    watched, seat = RECORDER.get(), getattr(module, LAYER_STATE, None)
    if watched is not None:
        out = watched(module, query, key, value, attention_mask)
    elif seat is None:
        return _stock(module, query, key, value, attention_mask, scaling, dropout)
    else:
        options = {
            "scale": scaling, "dropout": dropout, "softcap": more.get("softcap"),
            "sink_logits": more.get("s_aux"),
        }  # fmt: skip
        out = _attended(seat, (query, key, value), options)
    return out.transpose(1, 2).contiguous(), None


def _attended(
    seat: LayerState, heads: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
) -> Tensor:
    """Under autocast, heads of the type that it gives to transformers' own attention: turning by a
    wide cosine has left queries and keys wider than values."""
    device = heads[0].device.type
    if not torch.is_autocast_enabled(device):
        return seat.attend(*heads, options)
    q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in heads)
    with torch.autocast(device, enabled=False):  # what we widen shall stay wide
        return seat.attend(q, k, v, options)


def _stock(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False
    )


def padding_mask(*, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
    """The mask function: which keys are real (b 1 1 n), or None. The scheme says the rest."""
    if RECORDER.get() is not None:
        return _tagged(more)
    return None if attention_mask is None else attention_mask[:, None, None, :]


def _tagged(asked: dict[str, Any]) -> Tensor:
    """A mask that hides nothing and tells a probe which it would have been."""
    n = (int(asked["q_length"]), int(asked["kv_length"]))
    mask = torch.ones(asked["batch_size"], 1, *n, dtype=torch.bool, device=asked.get("device"))
    mask.shape_asked = (asked["mask_function"], asked.get("local_size"))  # type: ignore[attr-defined]
    return mask
