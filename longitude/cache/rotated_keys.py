"""A cache's keys, each turned as the last query wanted it, and turned on only where it changes.

Where a key stands in a region depends on the key alone, so with frequencies that are fixed a turned
key stays right until it crosses into another region: under plain RoPE, streaming and dual chunks
never, under ReRoPE and Self-Extend once in its life. A key is turned from one frame to the next by
the difference of the angles, in float32 at least, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from longitude.cache.decode_step import Step, between, same
from longitude.cache.kv_buffer import Columns
from longitude.cache.position_runs import Move, kept, pieces, read, tidy
from longitude.core.part import Pos, Region
from longitude.ops.decode import Line, Run, TableSpec
from longitude.parts.rope import Rope, apply_rotary

BLOCK = 4096  # columns turned at once: turning needs room for several copies


class Keys:
    """Keys (b h n d) and where they stand."""

    def __init__(self, rope: Rope | None, length: int) -> None:
        self.rope, self.length = rope, length
        self.columns = Columns(2)
        self.lines: list[Line] | None = [()]  # one for all sequences, or one each; None: no runs

    def append(self, k: Tensor, pos: Pos, padding: Tensor | None) -> None:
        """Put the unturned keys of new tokens behind the others."""
        new = read(pos, padding, len(self.columns)) if self.lines is not None else None
        if new is None and self.lines is not None:
            self.settle(None)
        self.lines = None if new is None else _joined(self.lines or [()], new)
        self.columns.append(k)

    def turned(self) -> bool:
        """Whether some key is not as it came."""
        return any(run.frame for run in _all(self.lines))

    def raw(self) -> Tensor:
        """All keys, unturned."""
        found = self.columns.view()
        if not self.turned():
            return found
        found = found.clone()
        self._settle(found, None)
        return found

    def lend(self) -> Tensor:
        """All keys, unturned, for someone who may hold on to them."""
        found = self.raw()
        self.columns.lent = self.columns.lent or not self.turned()
        return found

    def head(self) -> TableSpec:
        """What tables must fit."""
        k = self.columns.view()
        wide = torch.promote_types(k.dtype, torch.float32)
        return TableSpec(k.shape[-1], self.length, wide, k.device)

    def follow(self, step: Step) -> Tensor:
        """Turn what a step turns; all keys, as they then stand."""
        if step.turns:
            self.columns.own()
        k = self.columns.view()
        for move, rows, starts, spread in step.turns:
            mine = k if rows is None else k[rows[0] : rows[0] + 1]
            if spread is None:
                self._turn(mine, move, starts)
            else:
                here = mine[:, :, move.col : move.col + move.n]
                spread(here, out=here)
        self.lines = step.lines
        return k

    def settle(self, frame: Region | None) -> None:
        """Turn every key to one frame."""
        if self.lines is not None and any(run.frame != frame for run in _all(self.lines)):
            self.columns.own()
            self._settle(self.columns.view(), frame)
            self.lines = [tidy(r._replace(frame=frame) for r in line) for line in self.lines]

    def pick(self, index: Tensor) -> None:
        """Keep these columns, which ascend."""
        if self.lines is not None:
            spans = pieces(index.cpu())
            self.lines = [kept(line, spans) for line in self.lines]
        self.columns.pick(index)

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the batch."""
        if self.lines is not None and len(self.lines) > 1:
            rows = change(torch.arange(len(self.lines))).tolist()
            self.lines = [self.lines[r] for r in rows]
        self.columns.each(change)

    def _settle(self, k: Tensor, frame: Region | None) -> None:
        """Turn k, which stands as we do, to one frame; sequences that do it alike at once."""
        alike: dict[Move, dict[int, int]] = {}
        for r, line in enumerate(self.lines or ()):
            for run in line:
                if run.frame != frame:
                    move = Move(run.col, run.n, 0, run.frame, frame)
                    alike.setdefault(move, {})[r] = run.pos
        for move, starts in alike.items():
            if len(starts) == len(self.lines or ()):
                self._turn(k, move, same(tuple(starts.values())))
                continue
            for r, pos in starts.items():
                self._turn(k[r : r + 1], move, (pos,))

    def _turn(self, k: Tensor, move: Move, starts: tuple[int, ...]) -> None:
        """Turn columns in place."""
        assert self.rope is not None
        for done in range(0, move.n, BLOCK):
            n = min(BLOCK, move.n - done)
            here = k[:, :, move.col + done : move.col + done + n]
            tables = between(self.rope, self.head(), move, starts, done, n)
            here.copy_(apply_rotary(here, *tables, self.rope.pairs))


def _all(lines: list[Line] | None) -> Iterator[Run]:
    return (run for line in lines or () for run in line)


def _joined(old: list[Line], new: list[Line]) -> list[Line]:
    """Lines with new runs behind them; one line for all becomes one each where rows differ."""
    rows = max(len(old), len(new))
    old, new = (x * rows if len(x) < rows else x for x in (old, new))
    return [tidy(a + b) for a, b in zip(old, new, strict=True)]
