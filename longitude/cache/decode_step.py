"""One decoding step as a value: what every layer does alike, computed once for all of them.

Which spans of columns a query sees, which keys enter another region, and the tables that rotate
both depend on positions only. The tables cover all dimensions of a head, so that a rotation is
x·cos + x[partner]·sin in either pair layout: three operations per token.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longitude.cache.kv_buffer import FrameChange, Span, view_line
from longitude.core.part import Region
from longitude.core.scheme import Scheme
from longitude.ops.decode import Line, TableSpec
from longitude.ops.passes import Latest
from longitude.parts.rope import Rope
from longitude.parts.rotary_tables import Tables, cos_sin

MAX_CACHED = 64  # columns whose tables a step holds for all layers; more are rotated in blocks
Rows = tuple[int, ...] | None  # some sequences, or None for all


class HeadRotation(NamedTuple):
    """A rotation of all dimensions of a head; those past the rotary ones are unchanged."""

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x rotated, in float32 at least, or rounded into `out`."""
        return torch.addcmul(x * self.cos, x.index_select(-1, self.partner), self.sin, out=out)


class KeyUpdate(NamedTuple):
    """A frame change of some sequences; `starts` are their first positions, one each or for all."""

    change: FrameChange
    rows: Rows
    starts: tuple[int, ...]
    rotation: HeadRotation | None


class VisibleSpan(NamedTuple):
    """A span that some sequences see, and which of the rotated queries attends to it."""

    query: int
    span: Span
    rows: Rows


class DecodeStep(NamedTuple):
    """Rotate these keys; rotate the query once per region; attend to each span."""

    updates: tuple[KeyUpdate, ...]
    queries: HeadRotation
    spans: tuple[VisibleSpan, ...]
    lines: list[Line]


@torch.no_grad()
def make_step(
    scheme: Scheme, spec: TableSpec, lines: list[Line], at: tuple[int, ...]
) -> DecodeStep:
    """The step of a query at these positions over these lines."""
    rope, rows = scheme.rotary, max(len(lines), len(at))
    assert rope is not None
    each = zip(*(x * rows if len(x) < rows else x for x in (lines, at)), strict=True)
    views = [view_line(scheme, line, i) for line, i in each]
    changes: dict[FrameChange, dict[int, int]] = {}
    visible: dict[tuple[Region, Span], list[int]] = {}
    for r, view in enumerate(views):
        for change in view.changes:
            changes.setdefault(change._replace(pos=0), {})[r] = change.pos
        for span in view.visible:
            visible.setdefault(span, []).append(r)
    regions = list(dict.fromkeys(region for region, _ in visible))
    with torch.inference_mode(False):  # they may be used outside it later
        updates = [
            update
            for change, starts in changes.items()
            for update in _key_updates(rope, spec, change, starts, rows)
        ]
        tables = [_region_tables(rope, _on_cpu(spec), r, "q", at, 1) for r in regions or [Region()]]
        cos, sin = (torch.stack(table) for table in zip(*tables, strict=True))
        queries = _head_rotation(rope, spec, cos, sin)
    spans = tuple(
        VisibleSpan(regions.index(region), span, None if len(seen) == rows else tuple(seen))
        for (region, span), seen in visible.items()
    )
    return DecodeStep(tuple(updates), queries, spans, [view.line for view in views])


latest_step = Latest(make_step)  # the other layers of a step need the same


def _key_updates(
    rope: Rope, spec: TableSpec, change: FrameChange, starts: dict[int, int], rows: int
) -> list[KeyUpdate]:
    """All sequences at once if all change these columns, otherwise each by itself."""
    if len(starts) < rows:
        groups = [((r,), (pos,)) for r, pos in starts.items()]
    else:
        groups = [(None, one_if_equal(tuple(starts.values())))]
    if change.n > MAX_CACHED:
        return [KeyUpdate(change, which, at, None) for which, at in groups]
    tables = [rotation_between(rope, _on_cpu(spec), change, at, 0, change.n) for _, at in groups]
    return [
        KeyUpdate(change, which, at, _head_rotation(rope, spec, cos, sin))
        for (which, at), (cos, sin) in zip(groups, tables, strict=True)
    ]


def _on_cpu(spec: TableSpec) -> TableSpec:
    """Small tables are computed faster on the host than by as many launches."""
    return spec._replace(device=torch.device("cpu"))


def one_if_equal(values: tuple[int, ...]) -> tuple[int, ...]:
    """One number for all if they are equal."""
    return values[:1] if len(set(values)) == 1 else values


def rotation_between(
    rope: Rope, spec: TableSpec, change: FrameChange, starts: tuple[int, ...], skip: int, n: int
) -> Tables:
    """Tables (b|1 1 n pairs) from one frame to another for n keys, `skip` after each start."""
    wide = spec._replace(dtype=torch.float64) if change.old and change.new else spec
    at = tuple(a + skip for a in starts)
    old, new = (
        frame and _region_tables(rope, wide, frame, "k", at, n)
        for frame in (change.old, change.new)
    )
    if old is None:
        assert new is not None
        return new
    if new is None:
        return old[0], -old[1]
    return (
        (new[0] * old[0] + new[1] * old[1]).to(spec.dtype),
        (new[1] * old[0] - new[0] * old[1]).to(spec.dtype),
    )


def _region_tables(
    rope: Rope, spec: TableSpec, region: Region, side: str, starts: tuple[int, ...], n: int
) -> Tables:
    """Tables of one side of a region, for n tokens from each start on."""
    size, length, dtype, device = spec
    pos = range(starts[0], starts[0] + n)
    if len(starts) > 1 or n <= MAX_CACHED:  # a range's tables would be cached beyond the step
        pos = torch.tensor(starts, device=device)[:, None] + torch.arange(n, device=device)
    return cos_sin(rope, region, side, pos, size, length, dtype=dtype, device=device)


def _head_rotation(rope: Rope, spec: TableSpec, cos: Tensor, sin: Tensor) -> HeadRotation:
    """Tables of pairs as tables of dimensions, on the device that uses them."""
    width = 2 * cos.shape[-1]
    rest = (0, spec.size - width)
    if rope.pairs == "half":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    cos = torch.nn.functional.pad(cos, rest, value=1.0).to(spec.device)
    sin = torch.nn.functional.pad(sin, rest).to(spec.device)
    return HeadRotation(cos, sin, _partner(rope.pairs, width, spec.size, spec.device))


@lru_cache(maxsize=64)
def _partner(pairs: str, width: int, size: int, device: torch.device) -> Tensor:
    """The other dimension of each one's pair; those past the rotary ones are their own."""
    partner = torch.arange(size)
    shape, flipped = ((2, -1), 0) if pairs == "half" else ((-1, 2), 1)
    partner[:width] = partner[:width].view(shape).flip(flipped).flatten()
    return partner.to(device)
