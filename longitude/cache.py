"""The cache of keys and values: keys unturned, their positions beside them, eviction by the mask.

Because keys are kept as they were before turning, every remap and every frequency scaling decodes
exactly as it prefills. There is no eviction policy to choose: a key goes when the scheme's mask
will never show it to a later query. `length` is what length-dependent frequencies see, fixed for
the cache's life.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.part import Mistake, Pos, as_tensor
from longitude.region import Area
from longitude.scheme import Scheme


class Kept(NamedTuple):
    """What attention reads: everything the new queries may see."""

    k: Tensor
    v: Tensor
    pos: Pos
    padding: Tensor | None


class Cache:
    """One layer's keys and values under a scheme."""

    def __init__(self, scheme: Scheme, length: int | Tensor | None = None) -> None:
        if not scheme.causal:
            raise Mistake(
                f"a cache serves decoding, but {scheme} is bidirectional: use a causal scheme."
            )
        rope = scheme.rotary
        if rope and rope.frequencies.by_length and length is None:
            raise Mistake(
                f"{rope.frequencies} depends on the total length: give Cache(scheme, length=…), "
                f"the "
                f"prompt and what may follow, which stays fixed while the cache lives."
            )
        self.scheme, self.length = scheme, length
        self._evicts = all(_bounded(area) for area in scheme.areas())
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._pos: Pos = range(0)
        self._padding: Tensor | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def update(
        self,
        k: Float[Tensor, "b h n d"],
        v: Float[Tensor, "b h n dv"],
        pos: Pos,
        padding: Bool[Tensor, "b n"] | None = None,
    ) -> Kept:
        """Add the keys of new tokens; give back all that these tokens' queries may see.

        What no later query can see is dropped only then, so the new queries still see it.
        """
        if (len(pos) if isinstance(pos, range) else pos.shape[-1]) != k.shape[2]:
            raise Mistake(f"{k.shape[2]} keys came with {pos} for positions: give one a key.")
        self._join_padding(k, padding)
        self._pos = _joined(self._pos, pos, self._size, k.device)
        self._k, self._v = _appended(self._k, k, self._size), _appended(self._v, v, self._size)
        self._size += k.shape[2]
        kept = Kept(
            self._k[:, :, : self._size], self._v[:, :, : self._size], self._pos, self._padding
        )
        if self._evicts and self._size:
            self._evict()
        return kept

    def _join_padding(self, k: Tensor, padding: Tensor | None) -> None:
        if padding is None and self._padding is None:
            return
        old = self._padding
        if old is None:
            old = torch.zeros(k.shape[0], self._size, dtype=torch.bool, device=k.device)
        new = padding if padding is not None else old.new_zeros(k.shape[0], k.shape[2])
        self._padding = torch.cat([old, new], 1)

    def _evict(self) -> None:
        """Drop the columns that no later query of any row can see."""
        assert self._k is not None and self._v is not None
        pos = torch.atleast_2d(as_tensor(self._pos, self._k.device))
        now = pos.amax(1, keepdim=True) + 1
        keep = torch.zeros_like(pos, dtype=torch.bool)
        for area in self.scheme.areas():
            keep |= area.ever(now, pos)
        if self._padding is not None:
            keep = keep & ~self._padding
        keep = keep.any(0)
        if bool(keep.all()):
            return
        index = keep.nonzero()[:, 0]
        self._k, self._v = self._k[:, :, index], self._v[:, :, index]
        self._padding = None if self._padding is None else self._padding[:, index]
        self._size = index.numel()
        self._pos = _picked(self._pos, index)


def _bounded(area: Area) -> bool:
    """Whether keys of this area can ever leave it, as queries move on."""
    bounds = [area.hi, area.last, area.bottom, *(c.hi for c in area.chunks)]
    return any(b is not None for b in bounds)


def _joined(old: Pos, new: Pos, size: int, device: torch.device) -> Pos:
    if isinstance(old, range) and isinstance(new, range):
        if size == 0:
            return new
        if old.step == new.step == 1 and old.stop == new.start:
            return range(old.start, new.stop)
    a, b = (torch.atleast_2d(as_tensor(p, device)) for p in (old, new))
    if size == 0:
        return b
    rows = max(a.shape[0], b.shape[0])
    return torch.cat([a.expand(rows, -1), b.expand(rows, -1)], 1)


def _appended(buffer: Tensor | None, new: Tensor, size: int) -> Tensor:
    """The buffer with new columns at `size`; room doubles, so that a token costs its own copy
    only."""
    if buffer is None:
        return new
    if torch.is_grad_enabled() and (buffer.requires_grad or new.requires_grad):
        return torch.cat([buffer[:, :, :size], new], 2)
    total = size + new.shape[2]
    if total > buffer.shape[2] or buffer.is_inference() != new.is_inference():
        grown = new.new_empty(*new.shape[:2], 2 * total, new.shape[3])
        grown[:, :, :size] = buffer[:, :, :size]
        buffer = grown
    buffer[:, :, size:total] = new
    return buffer


def _picked(pos: Pos, index: Tensor) -> Pos:
    first, last = int(index[0]) if index.numel() else 0, int(index[-1]) + 1 if index.numel() else 0
    if isinstance(pos, range) and last - first == index.numel():
        return pos[first:last]
    return torch.atleast_2d(as_tensor(pos, index.device))[:, index]
