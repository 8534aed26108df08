"""Columns of a cache: tensors that grow token by token without copying what they hold.

There is room for a quarter more than what is held, so that a token costs its own copy only. What
was given out stays as it was while columns are only added; the first tensor, which is the caller's,
is never written to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longitude.core.part import Pos, as_tensor


class Columns:
    """A tensor that grows along one dimension."""

    def __init__(self, dim: int) -> None:
        self.dim, self.size = dim, 0
        self.room: Tensor | None = None
        self.ours = False
        self.lent = False  # whether someone holds on to what is held now

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Memory held, room to grow included."""
        return 0 if self.room is None else self.room.nbytes

    def view(self) -> Tensor:
        """All that is held."""
        assert self.room is not None
        return self.room.narrow(self.dim, 0, self.size)

    def append(self, new: Tensor) -> None:
        """Put new columns behind the others."""
        total = self.size + new.shape[self.dim]
        if self.room is None or self.size == 0:
            self.room, self.ours = new, False
        elif torch.is_grad_enabled() and (self.room.requires_grad or new.requires_grad):
            self.room, self.ours = torch.cat([self.view(), new], self.dim), False
        else:
            if total > self.room.shape[self.dim] or not self._ours_now():
                self._grow(total, new)
            self.room.narrow(self.dim, self.size, total - self.size).copy_(new)
        self.size = total

    def _grow(self, total: int, like: Tensor) -> None:
        assert self.room is not None
        shape = list(self.room.shape)
        shape[self.dim] = total + max(total // 4, 64)
        grown = torch.empty(shape, dtype=self.room.dtype, device=like.device)
        grown.narrow(self.dim, 0, self.size).copy_(self.view())
        self.room, self.ours, self.lent = grown, True, False

    def own(self) -> None:
        """Make what is held ours to change."""
        assert self.room is not None
        if self.lent or not self._ours_now():
            self._grow(self.size, self.room)

    def _ours_now(self) -> bool:
        """Whether we may write: an inference tensor can't be written to outside inference mode."""
        assert self.room is not None
        frozen = self.room.is_inference() and not torch.is_inference_mode_enabled()
        return self.ours and not frozen

    def pick(self, index: Tensor) -> None:
        """Keep the columns of these indices, which ascend."""
        if self.room is None or not self.size:
            return
        n = index.numel()
        if n and int(index[-1]) != n - 1:  # otherwise the first ones stay, and nothing moves
            self.room = self.view().index_select(self.dim, index.to(self.room.device))
            self.ours = True
        self.size = n

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the tensor in its other dimensions."""
        if self.room is not None:
            self.room, self.ours = change(self.room), True


def joined(old: Pos, new: Pos, device: torch.device | None = None) -> Pos:
    """Positions behind others: a range where they go on, a tensor (b|1, n) otherwise."""
    size = len(old) if isinstance(old, range) else old.shape[-1]
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


def picked(pos: Pos, index: Tensor) -> Pos:
    """The positions of these indices, which ascend."""
    first, last = (int(index[0]), int(index[-1]) + 1) if index.numel() else (0, 0)
    if isinstance(pos, range) and last - first == index.numel():
        return pos[first:last]
    rows = torch.atleast_2d(as_tensor(pos))
    return rows[:, index.to(rows.device)]
