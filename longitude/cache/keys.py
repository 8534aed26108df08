"""A cache's keys, each turned as the last query wanted it, and turned on only where it changes.

Where a key stands in a region depends on the key alone, so with frequencies that are fixed a turned
key stays right until it crosses into another region: under plain RoPE, streaming and dual chunks
never, under ReRoPE and Self-Extend once in its life. A key is turned from one frame to the next by
the difference of the angles, in float32 at least, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longitude.cache.columns import Columns
from longitude.cache.lines import Line, Move, kept, pieces, read, tidy
from longitude.part import Pos, Region
from longitude.parts.rotary.memo import Memo, Tables
from longitude.parts.rotary.rope import Rope
from longitude.parts.rotary.tables import cos_sin
from longitude.parts.rotary.turn import turn

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
        return any(run.frame for line in self.lines or () for run in line)

    def raw(self) -> Tensor:
        """All keys, unturned."""
        found = self.columns.view()
        if not self.turned():
            return found
        found = found.clone()
        self._turn(found, self._moves(None))
        return found

    def lend(self) -> Tensor:
        """All keys, unturned, for someone who may hold on to them."""
        found = self.raw()
        self.columns.lent = self.columns.lent or not self.turned()
        return found

    def move(self, wanted: list[tuple[Move, ...]], lines: list[Line]) -> None:
        """Turn keys, each line's own; the lines then stand so."""
        self.lines = lines
        if any(wanted):
            self.columns.own()
            self._turn(self.columns.view(), wanted)

    def settle(self, frame: Region | None) -> None:
        """Turn every key to one frame."""
        if self.lines is not None:
            self.move(self._moves(frame), [_settled(line, frame) for line in self.lines])

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

    def _moves(self, frame: Region | None) -> list[tuple[Move, ...]]:
        """What brings every line's keys to one frame."""
        return [
            tuple(Move(r.col, r.n, r.pos, r.frame, frame) for r in line if r.frame != frame)
            for line in self.lines or ()
        ]

    def _turn(self, k: Tensor, wanted: list[tuple[Move, ...]]) -> None:
        """Turn columns in place; where all sequences turn the same columns, all of them at once."""
        alike: dict[tuple[int, int, Region | None, Region | None], dict[int, int]] = {}
        for r, moves in enumerate(wanted):
            for m in moves:
                alike.setdefault((m.col, m.n, m.old, m.new), {})[r] = m.pos
        for (col, n, old, new), starts in alike.items():
            if len(starts) == len(wanted):
                self._turn_span(k, Move(col, n, 0, old, new), tuple(starts.values()))
                continue
            for r, pos in starts.items():
                self._turn_span(k[r : r + 1], Move(col, n, 0, old, new), (pos,))

    def _turn_span(self, k: Tensor, move: Move, starts: tuple[int, ...]) -> None:
        assert self.rope is not None
        for done in range(0, move.n, BLOCK):
            n = min(BLOCK, move.n - done)
            here = k[:, :, move.col + done : move.col + done + n]
            tables = self._tables(move, tuple(a + done for a in starts), n, k)
            here.copy_(turn(here, *tables, self.rope.pairs))

    def _tables(self, move: Move, starts: tuple[int, ...], n: int, k: Tensor) -> Tables:
        starts = starts[:1] if len(set(starts)) == 1 else starts
        dtype, size = torch.promote_types(k.dtype, torch.float32), k.shape[-1]
        return between(self.rope, move.old, move.new, starts, n, size, self.length, dtype, k.device)


def _settled(line: Line, frame: Region | None) -> Line:
    return tidy(run._replace(frame=frame) for run in line)


def _between(
    rope: Rope,
    old: Region | None,
    new: Region | None,
    starts: tuple[int, ...],
    n: int,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tables:
    """Tables that turn keys from one frame to another, n from each start on."""
    wide = torch.float64 if old and new else dtype
    a, b = (
        frame and places(rope, frame, "k", starts, n, head_dim, length, wide, device)
        for frame in (old, new)
    )
    with torch.inference_mode(False), torch.no_grad():
        if a is None:
            assert b is not None
            return b
        if b is None:
            return a[0], -a[1]
        return (
            (b[0] * a[0] + b[1] * a[1]).to(dtype),
            (b[1] * a[0] - b[0] * a[1]).to(dtype),
        )


def _places(
    rope: Rope,
    region: Region,
    side: str,
    starts: tuple[int, ...],
    n: int,
    head_dim: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tables:
    """Tables of one side of a region, n from each start on."""
    with torch.inference_mode(False):
        at = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)
    pos = range(starts[0], starts[0] + n) if len(starts) == 1 else at
    return cos_sin(rope, region, side, pos, head_dim, length, dtype=dtype, device=device)


between = Memo(_between, limit=2**25)
places = Memo(_places, limit=2**25)


def _joined(old: list[Line], new: list[Line]) -> list[Line]:
    """Lines with new runs behind them; one line for all becomes one each where rows differ."""
    rows = max(len(old), len(new))
    old, new = (x * rows if len(x) < rows else x for x in (old, new))
    return [tidy(a + b) for a, b in zip(old, new, strict=True)]
