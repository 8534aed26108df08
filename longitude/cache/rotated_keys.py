"""A cache's keys, rotated in place as the last query needed them, and one query over them.

The rotated position of a key in a region depends on the key alone, so with fixed frequencies a
rotated key stays valid until it enters another region: under plain RoPE, streaming and dual chunks
never, under ReRoPE and Self-Extend once in its life. A key is rotated from one frame to the next by
the difference of the angles, in float32 at least, and rounded once.

A decoding step is a value that all layers share: which spans of columns a query sees, which keys
enter another region, and the tables that rotate both depend on positions only. The tables cover all
dimensions of a head, so that a rotation is x·cos + x[partner]·sin in either pair layout: three
operations per token. Each span is then a plain attention call over a view of the cache, and the
spans merge by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from longitude.cache.kv_buffer import (
    Buffer,
    cut,
    join,
    lines_of,
    merge_runs,
    runs_of,
    select_columns,
)
from longitude.core.part import Pos, Region
from longitude.core.scheme import Scheme
from longitude.ops.decode import Line, Run, TableSpec, frame_of
from longitude.ops.lse_merge import Operator
from longitude.ops.passes import Latest, accum_dtype, region_areas
from longitude.parts.rope import Rope, apply_rotary
from longitude.parts.rotary_tables import Tables, cos_sin

BLOCK = 4096  # columns rotated at once: a rotation needs memory for several copies
STEPS = 64  # decoding steps whose tables are computed at once
CPU = torch.device("cpu")
Span = tuple[int, int]  # columns from the first up to the second
T = TypeVar("T")


class HeadRotation(NamedTuple):
    """A rotation of all dimensions of a head; those past the rotary ones are unchanged."""

    cos: Tensor
    sin: Tensor
    partner: Tensor

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotate x, in float32 at least, or rounded into `out`."""
        return torch.addcmul(x * self.cos, x.index_select(-1, self.partner), self.sin, out=out)


class FrameChange(NamedTuple):
    """Keys to rotate from one frame to another, of one sequence or of all (None); `starts` are the
    positions of the first of them, one for all or one per sequence."""

    col: int
    n: int
    old: Region | None
    new: Region | None
    row: int | None
    starts: tuple[int, ...]


class DecodeStep(NamedTuple):
    """Rotate these keys; rotate the query once per region; attend to each span.

    `columns` holds the changes of single keys: (the sequence, or None for all; one or two columns;
    their rotation). A span is (the index of its rotated query, its columns, the sequences that see
    it, or None for all).
    """

    changes: list[FrameChange]
    columns: list[tuple[int | None, slice, HeadRotation]]
    queries: HeadRotation
    spans: list[tuple[int, Span, tuple[int, ...] | None]]
    lines: list[Line]


class RotatedKeys:
    """Keys (b h n d) with their positions and frames."""

    def __init__(self, rope: Rope | None, length: int) -> None:
        self.rope, self.length = rope, length
        self.buffer = Buffer(2)
        self.lines: list[Line] | None = [()]  # one for all sequences, or one each; None: no runs

    def note(self, pos: Pos, padding: Tensor | None) -> None:
        """Record the positions of pre-RoPE keys that are appended to the buffer next."""
        lines = self.lines_with(pos, padding)
        if lines is None:
            self.rotate_all(None)
        self.lines = lines

    def lines_with(self, pos: Pos, padding: Tensor | None = None) -> list[Line] | None:
        """Return the lines with keys at these positions appended; None: no runs."""
        old = self.lines
        new = None if old is None else lines_of(pos, padding, len(self.buffer))
        if old is None or new is None:
            return None
        rows = range(max(len(old), len(new)))  # one for all becomes one each if rows differ
        return [join(old[r % len(old)], new[r % len(new)]) for r in rows]

    def any_rotated(self) -> bool:
        """Whether some key is not pre-RoPE."""
        return any(run.frame for line in self.lines or () for run in line)

    def pre_rope(self, share: bool = False) -> Tensor:
        """Return all keys pre-RoPE; `share` if the caller may keep them."""
        k = self.buffer.view()
        if self.any_rotated():
            k = k.clone()
            self._rotate_all(k, None)
        elif share:
            self.buffer.shared = True
        return k

    def table_spec(self, k: Tensor) -> TableSpec:
        """Return size, length, dtype and device of rotary tables for these keys."""
        return TableSpec(k.shape[-1], self.length, accum_dtype(k), k.device)

    def apply(self, step: DecodeStep) -> Tensor:
        """Rotate the keys that a step changes; return all keys, in the frames of that step."""
        if step.changes:
            self.buffer.make_writable()
        k = self.buffer.view()
        for change in step.changes:
            if change.n > 1:
                self._rotate(k, change)
        for row, columns, rotation in step.columns:
            part = (k if row is None else k[row : row + 1])[:, :, columns]
            rotation(part, out=part)
        self.lines = step.lines
        return k

    def rotate_all(self, frame: Region | None) -> None:
        """Rotate every key to one frame."""
        if any(run.frame != frame for line in self.lines or () for run in line):
            self.buffer.make_writable()
            self._rotate_all(self.buffer.view(), frame)
            moved = ((run._replace(frame=frame) for run in line) for line in self.lines or ())
            self.lines = [merge_runs(runs) for runs in moved]

    def select(self, index: Tensor) -> None:
        """Keep only these columns, in ascending order."""
        if self.lines is not None:
            kept = runs_of(index.cpu())
            self.lines = [select_columns(line, kept) for line in self.lines]
        self.buffer.select(index)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change` to the batch dimension."""
        if self.lines is not None and len(self.lines) > 1:
            rows = change(torch.arange(len(self.lines))).tolist()
            self.lines = [self.lines[r] for r in rows]
        self.buffer.map_batch(change)

    def _rotate_all(self, k: Tensor, frame: Region | None) -> None:
        """Rotate k from the frames in `lines` to one frame."""
        lines = [[run for run in line if run.frame != frame] for line in self.lines or ()]
        for change in _changes([[(run, frame) for run in line] for line in lines]):
            self._rotate(k, change)

    def _rotate(self, k: Tensor, change: FrameChange) -> None:
        """Rotate columns in place, block by block."""
        col, n, _, _, row, _ = change
        k = (k if row is None else k[row : row + 1])[:, :, col : col + n]
        assert self.rope is not None
        for first in range(0, n, BLOCK):
            block = k[:, :, first : first + BLOCK]
            tables = _between(self.rope, self.table_spec(k), change, first, block.shape[2])
            block.copy_(apply_rotary(block, *tables, self.rope.pairs))


def _changes(by_row: list[list[tuple[Run, Region | None]]]) -> list[FrameChange]:
    """Convert each sequence's runs and new frames to changes: of all sequences at once where all
    change the same columns, otherwise of each by itself."""
    starts: dict[tuple[int, int, Region | None, Region | None], dict[int, int]] = {}
    for r, runs in enumerate(by_row):
        for run, frame in runs:
            starts.setdefault((run.col, run.n, run.frame, frame), {})[r] = run.pos
    changes = []
    for columns, at in starts.items():
        if len(at) == len(by_row):
            changes.append(FrameChange(*columns, None, one_if_equal(tuple(at.values()))))
        else:
            changes += [FrameChange(*columns, r, (pos,)) for r, pos in at.items()]
    return changes


def one_if_equal(values: tuple[T, ...]) -> tuple[T, ...]:
    """Return one value for all if they are equal."""
    return values[:1] if len(set(values)) == 1 else values


@Latest  # reused by the other layers of a step
def latest_step(
    scheme: Scheme, spec: TableSpec, lines: list[Line], at: tuple[int, ...]
) -> DecodeStep:
    """Return the step of a query at these positions, one for all sequences or one each."""
    rows, step = max(len(lines), len(at)), at[0] % STEPS
    visible: dict[tuple[Region, Span], list[int]] = {}
    moved, after = [], []
    for r in range(rows):
        spans, runs, line = _view_line(scheme, lines[r % len(lines)], at[r % len(at)])
        for span in spans:
            visible.setdefault(span, []).append(r)
        moved.append(runs)
        after.append(line)
    regions = list(dict.fromkeys(region for region, _ in visible))
    seen = [
        (regions.index(region), span, None if len(own) == rows else tuple(own))
        for (region, span), own in visible.items()
    ]

    def back(positions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(position - step for position in positions)

    changes = _changes(moved)
    single = sorted((c for c in changes if c.n == 1), key=lambda c: (c.row is not None, c.col))
    shared = sum(c.row is None for c in single)
    ends = [*range(0, shared, 2), *range(shared, len(single) + 1)]
    pairs = [single[a:b] for a, b in pairwise(ends)]  # two columns of all sequences are a slice
    key_changes = [[c._replace(col=0, starts=back(c.starts)) for c in pair] for pair in pairs]
    step_rotations = _step_rotations(scheme, spec, back(at), regions or [Region()], key_changes)
    queries, *keys = (rotations[step] for rotations in step_rotations)
    columns = []
    for pair, rotation in zip(pairs, keys, strict=True):
        start, last = pair[0].col, pair[-1].col
        columns.append((pair[0].row, slice(start, last + 1, last - start or 1), rotation))
    return DecodeStep(changes, columns, queries, seen, after)


@Latest  # reused by the steps that follow
def _step_rotations(
    scheme: Scheme, spec: TableSpec, at: tuple[int, ...], regions: list[Region],
    changes: list[list[FrameChange]],
) -> list[list[HeadRotation]]:  # fmt: skip
    """Return the rotations of queries for all regions, then those of keys, at each of STEPS steps;
    `at` are the query positions of the first step."""
    rope, rotations = scheme.rotary, []
    assert rope is not None
    small = spec._replace(device=CPU)  # faster for small tables than as many launches
    with torch.inference_mode(False), torch.no_grad():  # they may later be used outside it
        groups = [[_region_tables(rope, small, region, "q", at, STEPS) for region in regions]]
        groups += [[_between(rope, small, change, 0, STEPS) for change in pair] for pair in changes]
        for n, tables in enumerate(groups):
            # (regions b|1 1 STEPS d) for queries, (b|1 1 1|2 STEPS d) for keys
            each = (torch.broadcast_tensors(*of_all) for of_all in zip(*tables, strict=True))
            cos, sin = (torch.stack(of_all, 2 if n else 0) for of_all in each)
            cos, sin, partner = _head_rotation(rope, spec, cos, sin)
            each = (x.unbind(3) if n else x.split(1, 3) for x in (cos, sin))
            rotations.append([HeadRotation(c, s, partner) for c, s in zip(*each, strict=True)])
    return rotations


def _view_line(
    scheme: Scheme, line: Line, i: int
) -> tuple[list[tuple[Region, Span]], list[tuple[Run, Region | None]], Line]:
    """Return what a query at position i sees of a line: the spans that each region shows, the runs
    that must be rotated for it with their new frames, and the line after that."""
    rope = scheme.rotary
    assert rope is not None
    visible: list[tuple[Region, Span]] = []
    changes: list[tuple[Run, Region | None]] = []
    for region, areas in region_areas(scheme, rope.query_rows(range(i, i + 1))):
        assert region is not None
        frame, spans = frame_of(region), list[Span]()
        intervals = [area.interval_of(i) for area in areas]
        for run, (first, last) in product(line, intervals):
            seen = cut(run, first - run.pos + run.col, last - run.pos + run.col)
            if seen.n:
                spans.append((seen.col, seen.col + seen.n))
                if run.frame != frame:
                    changes.append((seen, frame))
        merged: list[Span] = []
        for start, stop in sorted(spans):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        visible += [(region, span) for span in merged]
    for change, frame in changes:
        start, stop = change.col, change.col + change.n
        before, after = ([cut(run, a, b) for run in line] for a, b in ((0, start), (stop, None)))
        line = merge_runs((*before, change._replace(frame=frame), *after))
    return visible, changes, line


def _between(rope: Rope, spec: TableSpec, change: FrameChange, first: int, n: int) -> Tables:
    """Return tables (b|1 1 n pairs) from one frame to another, for n keys from the first-th on."""
    wide = spec._replace(dtype=torch.float64) if change.old and change.new else spec
    at = tuple(start + first for start in change.starts)
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
    """Return the tables of one side of a region, for n tokens from each start on."""
    pos: Pos = range(starts[0], starts[0] + n)
    if len(starts) > 1 or n <= STEPS:  # a range's tables would stay cached for longer
        first = torch.tensor(starts, device=spec.device)[:, None]
        pos = first + torch.arange(n, device=spec.device)
    return cos_sin(rope, region, side, pos, *spec)


def _head_rotation(rope: Rope, spec: TableSpec, cos: Tensor, sin: Tensor) -> HeadRotation:
    """Convert tables of pairs to tables of dimensions, on the device that uses them."""
    width = 2 * cos.shape[-1]
    rest = (0, spec.size - width)
    if rope.pairs == "half":
        cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    cos, sin = pad(cos, rest, value=1.0).to(spec.device), pad(sin, rest).to(spec.device)
    return HeadRotation(cos, sin, _partner(rope.pairs, width, spec.size, spec.device))


@lru_cache(maxsize=64)
def _partner(pairs: str, width: int, size: int, device: torch.device) -> Tensor:
    """Return the other dimension of each one's pair; those past the rotary ones are their own."""
    partner = torch.arange(size)
    shape, flipped = ((2, -1), 0) if pairs == "half" else ((-1, 2), 1)
    partner[:width] = partner[:width].view(shape).flip(flipped).flatten()
    return partner.to(device)


def run_step(
    step: DecodeStep, operator: Operator, q: Tensor, k: Tensor, v: Tensor, scale: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute attention to the spans that each sequence sees, merged."""
    # heads that share keys become rows of one head, so that keys are read once
    shape = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    rotated = step.queries(q).to(q.dtype).reshape(-1, *shape, q.shape[3]).unbind()
    outs, lses = [], []
    for query, (start, stop), rows in step.spans:
        # not SDPA: on Hopper it uses cuDNN, which spends milliseconds planning each new length
        heads, keys, values = rotated[query], k[:, :, start:stop], v[:, :, start:stop]
        if rows is None:
            out, lse, _ = operator.forward(heads, keys, values, False, scale)
        else:
            out, lse = torch.zeros_like(heads), None
            for r in (slice(row, row + 1) for row in rows):
                out[r], lse_r, _ = operator.forward(heads[r], keys[r], values[r], False, scale)
                lse = lse_r.new_full(shape, -torch.inf) if lse is None else lse  # others see none
                lse[r] = lse_r
        outs.append(out)
        lses.append(lse)
    if not outs:
        return torch.zeros_like(q)
    if sinks is not None:  # a sink's logit is one more part of the softmax, whose value is zero
        outs.append(torch.zeros_like(outs[0]))
        lses.append(sinks.to(lses[0].dtype).view(1, *shape[1:]))
    merged, total = outs[0], lses[0]
    for n, (out, lse) in enumerate(zip(outs[1:], lses[1:], strict=True), 1):
        share = torch.sigmoid(lse - total)
        if len(step.lines) > 1:  # a sequence may see neither span
            share = share.nan_to_num()
        merged = merged.to(share.dtype).lerp(out.to(share.dtype), share[..., None])
        total = total if n == len(outs) - 1 else torch.logaddexp(total, lse)
    return merged.to(q.dtype).reshape(q.shape)
