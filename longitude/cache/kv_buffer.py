"""Growable buffers of keys and values, and the runs of consecutive positions in their columns.

A buffer has spare capacity for a quarter more than it holds, so that a token costs only its own
copy. Returned views stay valid while columns are only appended; the first tensor, which is the
caller's, is never written to.

Positions are known on the host: the columns of each sequence are a few runs of consecutive
positions, and a run also records the region its keys are rotated for (its frame). What a query sees
of them then follows by integer arithmetic, without touching the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

from longitude.core.part import Pos, as_rows
from longitude.ops.decode import Line, Run

MAX_RUNS = 16  # per sequence; with more, positions are not treated as runs


class Buffer:
    """A tensor that grows along one dimension."""

    def __init__(self, dim: int) -> None:
        self.dim, self.size = dim, 0
        self.storage: Tensor | None = None
        self.owned = False  # whether the storage is ours, not the caller's
        self.shared = False  # whether a caller may keep the current view

    def __len__(self) -> int:
        return self.size

    @property
    def nbytes(self) -> int:
        """Allocated memory in bytes, spare capacity included."""
        return 0 if self.storage is None else self.storage.nbytes

    @property
    def stored(self) -> Tensor:
        """The tensor with all columns, spare ones included."""
        assert self.storage is not None
        return self.storage

    def view(self) -> Tensor:
        """Return the columns in use."""
        return self.stored.narrow(self.dim, 0, self.size)

    def append(self, new: Tensor) -> None:
        """Add columns at the end."""
        total = self.size + new.shape[self.dim]
        if self.storage is None or self.size == 0:
            self.storage, self.owned = new, False
        elif torch.is_grad_enabled() and (self.storage.requires_grad or new.requires_grad):
            self.storage, self.owned = torch.cat([self.view(), new], self.dim), False
        else:
            if total > self.storage.shape[self.dim] or not self._writable():
                self._grow(total, new)
            self.storage.narrow(self.dim, self.size, total - self.size).copy_(new)
        self.size = total

    @property
    def has_room(self) -> bool:
        """Whether one more column can be written in place."""
        room = self.storage is not None and self.size < self.storage.shape[self.dim]
        return room and self._writable() and not self.shared

    def write(self, new: Tensor, slot: Tensor) -> None:
        """Write a column that is already counted, at an index on the device."""
        self.stored.index_copy_(self.dim, slot, new)

    def _grow(self, total: int, like: Tensor) -> None:
        shape = list(self.stored.shape)
        shape[self.dim] = total + max(total // 4, 64)
        grown = torch.empty(shape, dtype=self.stored.dtype, device=like.device)
        grown.narrow(self.dim, 0, self.size).copy_(self.view())
        self.storage, self.owned, self.shared = grown, True, False

    def make_writable(self) -> None:
        """Copy the columns unless they may be modified in place."""
        if self.shared or not self._writable():
            self._grow(self.size, self.stored)

    def _writable(self) -> bool:
        """Whether the storage may be written to: an inference tensor only in inference mode."""
        read_only = self.stored.is_inference() and not torch.is_inference_mode_enabled()
        return self.owned and not read_only

    def select(self, index: Tensor) -> None:
        """Keep only the columns at these ascending indices."""
        if self.storage is None or not self.size:
            return
        n = index.numel()
        if n and int(index[-1]) != n - 1:  # otherwise only the end is dropped, and nothing moves
            self.storage = self.view().index_select(self.dim, index.to(self.storage.device))
            self.owned = True
        self.size = n

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to the batch dimension of the tensor."""
        if self.storage is not None:
            self.storage, self.owned = change(self.storage), True


def append_positions(old: Pos, new: Pos, device: torch.device | None = None) -> Pos:
    """Append positions to others: a range where they continue it, a tensor (b|1, n) otherwise."""
    size = len(old) if isinstance(old, range) else old.shape[-1]
    if isinstance(old, range) and isinstance(new, range):
        if size == 0:
            return new
        if old.step == new.step == 1 and old.stop == new.start:
            return range(old.start, new.stop)
    a, b = (as_rows(p, device) for p in (old, new))
    if size == 0:
        return b
    rows = max(a.shape[0], b.shape[0])
    return torch.cat([a.expand(rows, -1), b.expand(rows, -1)], 1)


def select_positions(pos: Pos, index: Tensor) -> Pos:
    """Return the positions at these ascending indices."""
    first, last = (int(index[0]), int(index[-1]) + 1) if index.numel() else (0, 0)
    if isinstance(pos, range) and last - first == index.numel():
        return pos[first:last]
    rows = as_rows(pos)
    return rows[:, index.to(rows.device)]


def cut(run: Run, start: int, stop: int | None) -> Run:
    """Return the part of a run in columns from start up to stop, possibly empty."""
    first = max(run.col, start)
    last = run.col + run.n if stop is None else min(run.col + run.n, stop)
    return Run(first, run.pos + first - run.col, max(last - first, 0), run.frame)


def join(line: Line, more: Line) -> Line:
    """Append runs to a line; the first may continue the line's last run."""
    if not line or not more:
        return line or more
    (*before, last), (new, *others) = line, more
    if (new.col, new.pos, new.frame) == (last.col + last.n, last.pos + last.n, last.frame):
        return (*before, Run(last.col, last.pos, last.n + new.n, last.frame), *others)
    return line + more


def merge_runs(runs: Iterable[Run]) -> Line:
    """Merge runs that continue each other into a line, dropping empty ones."""
    return reduce(join, ((run,) for run in runs if run.n), ())


def select_columns(line: Line, kept: Line) -> Line:
    """Return a line of only the columns in `kept`, whose runs hold old columns as positions."""
    runs = []
    for new, old, n, _ in kept:
        pieces = (cut(run, old, old + n) for run in line)
        runs += [piece._replace(col=piece.col - old + new) for piece in pieces]
    return merge_runs(runs)


def lines_of(pos: Pos, padding: Tensor | None, first: int) -> list[Line] | None:
    """Return the lines of new columns, from column `first` on: one for all sequences, or one each.

    None if positions do not form a few runs.
    """
    if isinstance(pos, range) and pos.step == 1 and padding is None:
        return [(Run(first, pos.start, len(pos)),) if pos else ()]
    rows = as_rows(pos if isinstance(pos, range) else to_host(pos))
    if rows.is_floating_point():
        return None
    hidden = None if padding is None else to_host(padding)
    if hidden is not None:
        rows = rows.expand(hidden.shape[0], -1)
    lines = [
        runs_of(row, None if hidden is None else hidden[r], first) for r, row in enumerate(rows)
    ]
    return None if any(len(line) > MAX_RUNS for line in lines) else lines


def runs_of(pos: Tensor, hidden: Tensor | None = None, first: int = 0) -> Line:
    """Return the runs of positions in columns from `first` on, without hidden ones."""
    shown = torch.ones_like(pos, dtype=torch.bool) if hidden is None else ~hidden
    continues = shown[1:] & shown[:-1] & (pos[1:] == pos[:-1] + 1)
    heads, tails = shown.clone(), shown.clone()
    heads[1:] &= ~continues
    tails[:-1] &= ~continues
    ends = zip(heads.nonzero()[:, 0].tolist(), tails.nonzero()[:, 0].tolist(), strict=True)
    at = pos.tolist() if len(pos) <= MAX_RUNS else pos
    return tuple(Run(first + a, int(at[a]), b - a + 1) for a, b in ends)


_last: dict[torch.dtype, tuple[weakref.ref[Tensor], tuple[object, ...], Tensor]] = {}


def to_host(x: Tensor) -> Tensor:
    """Return a tensor on the CPU. The last one is cached: every layer of a step needs the same
    tensor or the same slice, and each copy would synchronize with the device."""
    if x.device.type == "cpu":
        return x
    if x.is_inference():  # it has no version counter
        return x.cpu()
    base = x if x._base is None else x._base
    version = (x._version, x.storage_offset(), x.shape, x.stride())
    last = _last.get(x.dtype)
    if last is not None and last[0]() is base and last[1] == version:
        return last[2]
    copy = x.cpu()
    _last[x.dtype] = weakref.ref(base), version, copy
    return copy
