"""The KV cache: keys with their positions, evicted by the mask.

There is no eviction policy to choose: a key is dropped when the scheme's mask hides it from every
later query. `length` is what length-dependent frequencies see, fixed for the cache's life.

Eviction waits for the next tokens, so that those just added still see all they may, and it keeps
`slack` tokens more than the mask requires: assisted decoding adds candidates and takes them back
with `crop`, and dropping one key per step would copy all of them each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.cache.kv_buffer import Buffer, append_positions, select_positions
from longitude.cache.rotated_keys import Decoder, Query, RotatedKeys
from longitude.core.part import Pos, Weights, as_tensor
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops.attention import attention


class Cached(NamedTuple):
    """The cached tokens that the new queries may see."""

    k: Tensor
    v: Tensor
    pos: Pos
    padding: Tensor | None


class Cache:
    """Keys and values of one layer under a scheme."""

    def __init__(self, scheme: Scheme, length: int | Tensor | None = None, slack: int = 64) -> None:
        if not scheme.causal:
            raise UserError(
                f"a cache serves decoding, but {scheme} is bidirectional: use a causal scheme."
            )
        rope = scheme.rotary
        if rope and rope.frequencies.by_length and length is None:
            raise UserError(
                f"{rope.frequencies} depends on the total length: give Cache(scheme, length=…), "
                f"the prompt and what may follow, which stays fixed while the cache lives."
            )
        self.scheme, self.length, self.slack = scheme, length, slack
        self._decoder = Decoder(scheme, length)
        self._evicts = scheme.forgets
        self.reset()

    def reset(self) -> None:
        """Drop everything."""
        self.seen = 0  # tokens ever added
        length = self.length if isinstance(self.length, int) else 1
        self.keys, self.values = RotatedKeys(self.scheme.rotary, length), Buffer(2)
        self._padding = Buffer(1)
        self._pos: Pos = range(0)
        self._order: Pos = range(0)  # index of each cached token among all ever added
        self._checked = 0  # tokens added when eviction was last considered
        self._min_crop = 0  # earlier tokens have lost what they could see

    def __len__(self) -> int:
        """Cached tokens."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Memory allocated for keys and values, spare capacity included."""
        return self.keys.buffer.nbytes + self.values.nbytes

    def update(
        self,
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n dv"],
        pos: Pos,
        padding: Bool[Tensor, "b n"] | None = None,
    ) -> Cached:
        """Add the keys and values of new tokens; returns all that their queries may see."""
        self.add(k, v, pos, padding)
        return Cached(self.keys.pre_rope(share=True), self.values.view(), self._pos, self._hidden())

    def add(
        self,
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n dv"],
        pos: Pos,
        padding: Bool[Tensor, "b n"] | None = None,
    ) -> None:
        """Add the keys and values of new tokens, whose queries may then `attend`."""
        new = k.shape[2]
        if (len(pos) if isinstance(pos, range) else pos.shape[-1]) != new:
            raise UserError(f"{new} keys came with {pos} for positions: give one per key.")
        if self._evicts and self.seen - self._checked > self.slack:
            self._evict()
        if padding is not None and not len(self._padding):
            self._padding.append(padding.new_zeros(k.shape[0], len(self)))
        if padding is not None or len(self._padding):
            unpadded = torch.zeros(k.shape[0], new, dtype=torch.bool, device=k.device)
            self._padding.append(unpadded if padding is None else padding)
        self._pos = append_positions(self._pos, pos, k.device)
        self._order = append_positions(self._order, range(self.seen, self.seen + new))
        self.keys.append(k, pos, padding)
        self.values.append(v)
        self.seen += new

    def attend(
        self,
        q: Float[Tensor, "b hq nq d"],
        q_pos: Pos,
        weights: Weights | None = None,
        **options: Any,
    ) -> Float[Tensor, "b hq nq dv"]:
        """Attention of the tokens just added over all cached ones.

        `options` are those of `longitude.attention`; padding and the length are the cache's own.
        """
        options |= {"length": self.length, "key_padding": self._hidden()}
        v, pos = self.values.view(), self._pos
        out = self._decoder.attend(Query(self.keys, v, q, q_pos, pos, weights, options))
        if out is not None:
            return out
        return attention(self.scheme, q, self.keys.pre_rope(), v, q_pos, pos, weights, **options)

    def crop(self, seen: int) -> None:
        """Drop all but the first `seen` tokens ever added."""
        if not 0 <= seen <= self.seen:
            raise UserError(f"a cache that has seen {self.seen} tokens can't be cropped to {seen}.")
        if seen < self._min_crop:
            raise UserError(
                f"this cache can't go back to its first {seen} tokens, because what these could "
                f"see has been evicted: crop to {self._min_crop} or more, or give a larger slack."
            )
        order = torch.as_tensor(as_tensor(self._order))
        self._select((order.flatten() < seen).nonzero()[:, 0])
        self.seen, self._checked = seen, min(self._checked, seen)

    def reorder(self, rows: Tensor) -> None:
        """Sequence r becomes what sequence rows[r] was: beam search."""
        self._map_batch(lambda x: x.index_select(0, rows.to(x.device)))

    def select(self, rows: Tensor) -> None:
        """Keep these sequences: indices, or True for each one to keep."""
        self.reorder(rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows)

    def repeat(self, times: int) -> None:
        """Each sequence `times` times, one after the other."""
        self._map_batch(lambda x: x.repeat_interleave(times, 0))

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the batch of everything that has one."""
        for buffer in (self.keys, self.values, self._padding):
            buffer.map_batch(change)
        if isinstance(self._pos, Tensor) and self._pos.shape[0] > 1:
            self._pos = change(self._pos)
        if isinstance(self.length, Tensor) and self.length.dim():
            self.length = change(self.length)

    def _hidden(self) -> Tensor | None:
        return self._padding.view() if len(self._padding) else None

    def _evict(self) -> None:
        """Drop the columns that no query after the last `slack` tokens can see, of any row."""
        self._checked = self.seen
        before = len(self) - self.slack
        if before <= 0:
            return
        device = torch.device("cpu") if isinstance(self._pos, range) else self._pos.device
        pos = torch.atleast_2d(as_tensor(self._pos, device))[:, :before]
        now = pos.amax(1, keepdim=True) + 1
        keep = torch.zeros_like(pos, dtype=torch.bool)
        for area in self.scheme.areas():
            keep |= area.ever(now, pos)
        if len(self._padding):
            keep = keep & ~self._padding.view()[:, :before].to(device)
        keep = keep.any(0)
        if not bool(keep.all()):
            last = torch.arange(before, len(self), device=device)
            self._select(torch.cat([keep.nonzero()[:, 0], last]))
            self._min_crop = self.seen - self.slack

    def _select(self, index: Tensor) -> None:
        """Keep these columns."""
        for buffer in (self.keys, self.values, self._padding):
            buffer.select(index)
        self._pos = select_positions(self._pos, index)
        self._order = select_positions(self._order, index)
