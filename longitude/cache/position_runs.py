"""Where a cache's columns stand, known on the host: each sequence's columns as a few runs of
consecutive positions, and the plan of one query over them.

A run also says how its keys are turned now. Which keys a query sees and how each must be turned is
then a matter of whole numbers, read off the scheme's areas without touching the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.core.part import Pos, Region, as_tensor, by_rows
from longitude.core.scheme import Scheme
from longitude.ops.decode import Line, Run, frame_of
from longitude.ops.passes import region_areas, tiles

MOST = 16  # runs of one sequence; positions in more pieces are no runs at all
Span = tuple[int, int]  # columns from the first up to the second


class Move(NamedTuple):
    """Keys to be turned from one frame to another; the first of them stands at `pos`."""

    col: int
    n: int
    pos: int
    old: Region | None
    new: Region | None


class Plan(NamedTuple):
    """One query over one line: what each region shows, which keys turn before, the line after."""

    shown: tuple[tuple[Region, Span], ...]
    moves: tuple[Move, ...]
    line: Line


def plan(scheme: Scheme, line: Line, i: int) -> Plan:
    """What a query at position i sees of a line, and what must turn for it."""
    rope = scheme.rotary
    assert rope is not None
    rows = (i,) if by_rows(rope.frequencies) else None
    shown: list[tuple[Region, Span]] = []
    moves: list[Move] = []
    for region, areas in region_areas(scheme, rows):
        assert region is not None
        frame, spans = frame_of(region), []
        for run in line:
            for tile in tiles(areas, range(i, i + 1), range(run.pos, run.pos + run.n)):
                col, n = run.col + tile.left, tile.width
                spans.append((col, col + n))
                if run.frame != frame:
                    moves.append(Move(col, n, run.pos + tile.left, run.frame, frame))
        shown += [(region, span) for span in _touching(spans)]
    return Plan(tuple(shown), tuple(moves), _moved(line, moves))


def _touching(spans: list[Span]) -> list[Span]:
    """Spans with those that touch as one."""
    found: list[Span] = []
    for a, b in sorted(spans):
        if found and found[-1][1] == a:
            a = found.pop()[0]
        found.append((a, b))
    return found


def _moved(line: Line, moves: list[Move]) -> Line:
    """The line after its keys have turned."""
    runs = list(line)
    for move in moves:
        runs = [piece for run in runs for piece in _turned(run, move)]
    return tidy(runs)


def _turned(run: Run, move: Move) -> Iterable[Run]:
    a, b = max(run.col, move.col), min(run.col + run.n, move.col + move.n)
    if a >= b:
        return (run,)
    pieces = [
        Run(run.col, run.pos, a - run.col, run.frame),
        Run(a, run.pos + a - run.col, b - a, move.new),
        Run(b, run.pos + b - run.col, run.col + run.n - b, run.frame),
    ]
    return (piece for piece in pieces if piece.n)


def tidy(runs: Iterable[Run]) -> Line:
    """Runs with those that go on as one."""
    found: list[Run] = []
    for run in runs:
        if found:
            last = found[-1]
            if (run.col, run.pos, run.frame) == (last.col + last.n, last.pos + last.n, last.frame):
                run = found.pop()._replace(n=last.n + run.n)
        found.append(run)
    return tuple(found)


def kept(line: Line, pieces: list[Span]) -> Line:
    """The line when only these pieces of the columns stay, moved together."""
    found, first = [], 0
    for start, stop in pieces:
        for run in line:
            a, b = max(run.col, start), min(run.col + run.n, stop)
            if a < b:
                found.append(Run(first + a - start, run.pos + a - run.col, b - a, run.frame))
        first += stop - start
    return tidy(found)


def pieces(index: Tensor) -> list[Span]:
    """Ascending indices as spans."""
    return [(run.pos, run.pos + run.n) for run in _runs(index, None, 0)]


def read(pos: Pos, padding: Tensor | None, first: int) -> list[Line] | None:
    """The lines of new columns, from column `first` on: one for all sequences, or one for each.

    None where positions don't run.
    """
    if isinstance(pos, range) and pos.step == 1 and padding is None:
        return [(Run(first, pos.start, len(pos)),) if pos else ()]
    rows = torch.atleast_2d(as_tensor(pos) if isinstance(pos, range) else on_host(pos))
    if rows.is_floating_point():
        return None
    hidden = None if padding is None else on_host(padding)
    if hidden is not None:
        rows = rows.expand(hidden.shape[0], -1)
    found = [_runs(row, None if hidden is None else hidden[r], first) for r, row in enumerate(rows)]
    return None if any(len(line) > MOST for line in found) else found


def _runs(pos: Tensor, hidden: Tensor | None, first: int) -> Line:
    shown = torch.ones_like(pos, dtype=torch.bool) if hidden is None else ~hidden
    goes_on = shown[1:] & shown[:-1] & (pos[1:] == pos[:-1] + 1)
    heads, tails = shown.clone(), shown.clone()
    heads[1:] &= ~goes_on
    tails[:-1] &= ~goes_on
    ends = zip(heads.nonzero()[:, 0].tolist(), tails.nonzero()[:, 0].tolist(), strict=True)
    at = pos.tolist() if len(pos) <= MOST else pos
    return tuple(Run(first + a, int(at[a]), b - a + 1) for a, b in ends)


_last: dict[torch.dtype, tuple[weakref.ref[Tensor], tuple[object, ...], Tensor]] = {}


def on_host(x: Tensor) -> Tensor:
    """A tensor on the CPU. The one asked for last is remembered: every layer of a step asks for the
    same or the same slice, and each time the device would have to finish first."""
    if x.device.type == "cpu":
        return x
    if x.is_inference():  # its changes are not counted
        return x.cpu()
    whole = x if x._base is None else x._base
    part = (x._version, x.storage_offset(), x.shape, x.stride())
    last = _last.get(x.dtype)
    if last is not None and last[0]() is whole and last[1] == part:
        return last[2]
    made = x.cpu()
    _last[x.dtype] = weakref.ref(whole), part, made
    return made
