"""One step of decoding as a value: what every layer does alike, settled once for all of them.

Which spans a query sees, which keys cross into another region, and the tables that turn both depend
on positions only. The tables are spread over all of a head's dimensions, so that a rotation is
x·cos + x[partner]·sin in either pair layout: three operations for a token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.cache.position_runs import Move, Span, plan
from longitude.core.part import Region
from longitude.core.scheme import Scheme
from longitude.ops.decode import Latest, Line, TableSpec
from longitude.parts.rope import Rope
from longitude.parts.rotary_tables import Tables, cos_sin

SHORT = 64  # columns that turn by spread tables, which the step keeps; more of them turn in blocks
Rows = tuple[int, ...] | None  # some sequences, or None for all


class Spread(NamedTuple):
    """A rotation of every dimension of a head; those past the rotary ones stay."""

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x turned, in float32 at least, or rounded into `out`."""
        return torch.addcmul(x * self.cos, x.index_select(-1, self.partner), self.sin, out=out)


class Turn(NamedTuple):
    """Keys of some sequences that turn; `starts` are their first positions, one each or for all."""

    move: Move
    rows: Rows
    starts: tuple[int, ...]
    spread: Spread | None


class Part(NamedTuple):
    """A span that some sequences see, and which of the turned queries looks at it."""

    query: int
    span: Span
    rows: Rows


class Step(NamedTuple):
    """Turn these keys; turn the query once for each region; look at each span."""

    turns: tuple[Turn, ...]
    queries: Spread
    parts: tuple[Part, ...]
    lines: list[Line]


@torch.no_grad()
def _make(scheme: Scheme, head: TableSpec, lines: list[Line], at: tuple[int, ...]) -> Step:
    """The step of a query that stands at these positions, over these lines."""
    rope, rows = scheme.rotary, max(len(lines), len(at))
    assert rope is not None
    each = zip(*(x * rows if len(x) < rows else x for x in (lines, at)), strict=True)
    plans = [plan(scheme, line, i) for line, i in each]
    crossing: dict[Move, dict[int, int]] = {}
    shown: dict[tuple[Region, Span], list[int]] = {}
    for r, one in enumerate(plans):
        for m in one.moves:
            crossing.setdefault(m._replace(pos=0), {})[r] = m.pos
        for part in one.shown:
            shown.setdefault(part, []).append(r)
    regions = list(dict.fromkeys(region for region, _ in shown))
    with torch.inference_mode(False):  # they may be used outside it later
        turns = [t for m, starts in crossing.items() for t in _turns(rope, head, m, starts, rows)]
        queries = _queries(rope, head, regions, at)
    parts = tuple(
        Part(regions.index(region), span, None if len(seen) == rows else tuple(seen))
        for (region, span), seen in shown.items()
    )
    return Step(tuple(turns), queries, parts, [one.line for one in plans])


step = Latest(_make)  # its other layers ask for the same


def _turns(
    rope: Rope, head: TableSpec, move: Move, starts: dict[int, int], rows: int
) -> list[Turn]:
    """All sequences at once where all turn these columns, otherwise each by itself."""
    if len(starts) < rows:
        every = [((r,), (pos,)) for r, pos in starts.items()]
    else:
        every = [(None, same(tuple(starts.values())))]
    if move.n > SHORT:
        return [Turn(move, which, at, None) for which, at in every]
    return [
        Turn(move, which, at, _spread(rope, head, *between(rope, _here(head), move, at, 0, move.n)))
        for which, at in every
    ]


def _here(head: TableSpec) -> TableSpec:
    """A few numbers are made faster on the host than by as many launches elsewhere."""
    return head._replace(device=torch.device("cpu"))


def _queries(rope: Rope, head: TableSpec, regions: list[Region], at: tuple[int, ...]) -> Spread:
    """The tables (regions b|1 1 1 d) that turn a query to its place in each region."""
    made = [_places(rope, _here(head), r, "q", at, 1) for r in regions or [Region()]]
    cos, sin = (torch.stack(each) for each in zip(*made, strict=True))
    return _spread(rope, head, cos, sin)


def same(values: tuple[int, ...]) -> tuple[int, ...]:
    """One number for all where they are the same."""
    return values[:1] if len(set(values)) == 1 else values


def between(
    rope: Rope, head: TableSpec, move: Move, starts: tuple[int, ...], skip: int, n: int
) -> Tables:
    """Tables (b|1 1 n half) that turn n keys from one frame to another, `skip` after each start."""
    wide = head._replace(dtype=torch.float64) if move.old and move.new else head
    at = tuple(a + skip for a in starts)
    a, b = (frame and _places(rope, wide, frame, "k", at, n) for frame in (move.old, move.new))
    if a is None:
        assert b is not None
        return b
    if b is None:
        return a[0], -a[1]
    return (
        (b[0] * a[0] + b[1] * a[1]).to(head.dtype),
        (b[1] * a[0] - b[0] * a[1]).to(head.dtype),
    )


def _places(
    rope: Rope, head: TableSpec, region: Region, side: str, starts: tuple[int, ...], n: int
) -> Tables:
    """Tables of one side of a region, for n tokens from each start on."""
    size, length, dtype, device = head
    pos = range(starts[0], starts[0] + n)
    if len(starts) > 1 or n <= SHORT:  # as a range, each step's would be kept beyond the step
        pos = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)
    return cos_sin(rope, region, side, pos, size, length, dtype=dtype, device=device)


def _spread(rope: Rope, head: TableSpec, cos: Tensor, sin: Tensor) -> Spread:
    """Tables for pairs as tables for dimensions, brought to where they are used."""
    width = 2 * cos.shape[-1]
    rest = (0, head.size - width)
    if rope.pairs == "half":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    cos = torch.nn.functional.pad(cos, rest, value=1.0).to(head.device)
    sin = torch.nn.functional.pad(sin, rest).to(head.device)
    return Spread(cos, sin, _partner(rope.pairs, width, head.size, head.device))


@lru_cache(maxsize=64)
def _partner(pairs: str, width: int, size: int, device: torch.device) -> Tensor:
    """The other dimension of each one's pair; those that do not turn are their own."""
    found = torch.arange(size)
    half = found[:width].view(2, -1) if pairs == "half" else found[:width].view(-1, 2)
    found[:width] = half.flip(0 if pairs == "half" else 1).flatten()
    return found.to(device)
