"""Decoding: a few queries over a long run of pre-RoPE keys, rotated as the kernel reads them.

The keys that a query sees are cut into segments of consecutive positions in one region, so that the
score of i and j is q rotated by θ·x_q(i) against k rotated by θ·x_k(j), x the region's shifts.
A segment is read in blocks, and x_k(j) = x_k(first block) + blocks since then + steps within the
block; the last two do not depend on where the segment lies. So one small table rotates the keys of
all blocks, and a second one, with a row per block, rotates the query to match them; only θ·x_q -
θ·x_k(first block) is new at every step. Tables are computed in float64. All of it is done on the
host, once for all layers of a step (`plan_for`); a captured CUDA graph reads the same memory after
`DecodePlan.renew`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longitude.core.part import Frequencies, Region, by_rows
from longitude.core.region import Shift
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.ops.inputs import AttentionInputs, factors_fit_tables, scale_factors
from longitude.ops.kernels.launch import triton_available
from longitude.ops.passes import Latest, region_areas
from longitude.parts.rope import Rope
from longitude.parts.rotary_tables import Memo, Tables, cos_sin

MAX_QUERIES = 16  # of one sequence; more are a prefill
STEPS = 64  # steps of one query each that are planned at once
MAX_POSITION = 2**30  # positions of the kernel are 32 bits wide
FIELDS = 12  # integers per segment, before the bounds of its queries; indices of some of them:
BEFORE, COUNT, FIRST, LEAD = 0, 1, 3, 8


class Run(NamedTuple):
    """Columns col … col+n-1 hold positions pos … pos+n-1, rotated for `frame`, or pre-RoPE."""

    col: int
    pos: int
    n: int
    frame: Region | None = None


NO_RUN = Run(0, 0, 0)
Line = tuple[Run, ...]  # of one sequence; padding columns belong to no run
QueryPositions = Sequence[tuple[int, ...]]  # one row per sequence, or one for all


class SegmentKey(NamedTuple):
    """A segment: area number `stretch` of a region in a run, and whether its keys are rotated."""

    region: Region | None
    rotated: bool
    run: int
    stretch: int


# of each segment, by sequence: the offset from positions to columns (b), and the start and stop of
# the positions that each query sees (b nq 2)
Array = np.ndarray  # small: a call of numpy has less overhead than one of torch
Segments = dict[SegmentKey, tuple[Array, Array]]


class TableSpec(NamedTuple):
    """The parameters of rotary tables; `size` is the head dimension."""

    size: int
    length: int
    dtype: torch.dtype
    device: torch.device


class KeyRotation(NamedTuple):
    """Keys are rotated to x = ⌊(p mod modulo) / floor⌋ / divide, at these frequencies.

    Blocks of `span` positions are numbered from position 0 on; those of one period of the modulo,
    or of one group larger than a block, form a chunk.
    """

    frequencies: Frequencies | None
    modulo: int | None
    floor: int
    divide: float  # infinite where keys are not rotated here
    span: int  # as many full groups as fit into a block, or a part of one
    chunk: int

    @classmethod
    def of(cls, key: SegmentKey, block: int) -> KeyRotation:
        k, frequencies = (key.region or Region()).k, (key.region or Region()).frequencies
        assert isinstance(k, Shift)  # as `supports` requires
        if key.region is None or key.rotated or k.divide == math.inf:
            return cls(None, None, 1, math.inf, block, MAX_POSITION)
        if not k.floor:
            chunk = k.modulo or MAX_POSITION
            return cls(frequencies, k.modulo, 1, float(k.divide), block, chunk)
        group = int(k.divide)
        if group > block:
            return cls(frequencies, None, group, 1.0, block, group)
        return cls(frequencies, None, group, 1.0, block // group * group, MAX_POSITION)

    @property
    def per_chunk(self) -> int:
        """The number of blocks in a chunk."""
        return -(-self.chunk // self.span)

    # the methods below take one position or block number, or a tensor of them

    def block(self, p: Any) -> Any:
        """Return the number of the block that holds a position."""
        return p // self.chunk * self.per_chunk + p % self.chunk // self.span

    def lead(self, first: Any) -> Any:
        """Return the row of a segment's first block in the table of blocks."""
        return first % self.per_chunk if self.chunk < MAX_POSITION else 0

    def start(self, number: Any) -> Any:
        """Return the position where a block begins."""
        return number // self.per_chunk * self.chunk + number % self.per_chunk * self.span

    def place(self, p: Any) -> Any:
        """Return x of a position."""
        return (p % self.modulo if self.modulo else p) // self.floor / self.divide

    def base(self, first: Any) -> Any:
        """Return x at row 0 of the table of blocks, for a segment with this first block."""
        return first * 0.0 if self.modulo else self.place(self.start(first - self.lead(first)))


class DecodePlan(NamedTuple):
    """What the kernel reads: a row per sequence, or one for all, of integers and then the queries'
    tables (`floats` is a view of the same memory). `steps` and `starts` are tables (rotations, n,
    half) of the positions within a block and of the blocks. If `scaled`, the queries' tables
    include the factors of ④, and queries must be passed without them."""

    ints: Tensor
    floats: Tensor
    steps: Tables
    starts: Tables
    segments: int
    queries: int
    blocks: tuple[int, ...]  # of each row
    rotates: bool  # whether any keys are rotated as they are read
    even: int  # every block begins at a multiple of it
    scaled: bool

    def row(self, n: int) -> DecodePlan:
        """Return the plan of one row, in its own memory."""
        ints = self.ints[n : n + 1].clone()
        floats = ints.view(torch.float32)[:, ints.shape[1] - self.floats.shape[1] :]
        return self._replace(ints=ints, floats=floats, blocks=self.blocks[n : n + 1])

    def renew(self, later: DecodePlan) -> None:
        """Overwrite this plan by a later step's: a captured graph reads this memory."""
        same = self.starts[0] is later.starts[0] and self.rotates == later.rotates
        if not same or (self.ints.shape, self.segments) != (later.ints.shape, later.segments):
            raise UserError(
                f"a later step of {later.segments} segments does not fit the memory of one of "
                f"{self.segments}, or uses other tables: capture the graph anew."
            )
        self.ints.copy_(later.ints)


def unsupported_reason(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the kernel can't run these queries over these keys, or None."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return "it has no gradients"
    return _unsupported(scheme, _sizes(q, k, v))


class Sizes(NamedTuple):
    """The properties of tensors that a plan depends on."""

    queries: torch.Size
    kv_heads: int
    value_dim: int
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    return Sizes(q.shape, k.shape[1], v.shape[3], (q.dtype, k.dtype, v.dtype), q.device)


def _unsupported(scheme: Scheme, sizes: Sizes) -> str | None:
    if not triton_available(sizes.device):
        return "it needs a CUDA device and Triton"
    if sizes.queries[2] > MAX_QUERIES:
        return f"it takes up to {MAX_QUERIES} queries"
    if not supports(scheme):
        return "scores must be q·k alone, with all rotary pairs of a key at one position"
    return unsupported_tensors(sizes.dtypes, max(sizes.queries[3], sizes.value_dim))


def unsupported_tensors(dtypes: tuple[torch.dtype, ...], size: int) -> str | None:
    """Return why the kernel can't read q, k and v of these types and head size, or None."""
    if dtypes[0] not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the decoding kernel does not support {dtypes[0]}"
    if len(set(dtypes)) > 1:
        return "the decoding kernel needs queries, keys and values of one type"
    return "the decoding kernel takes heads of up to 256" if size > 256 else None


@lru_cache(maxsize=256)
def supports(scheme: Scheme) -> bool:
    """Whether scores are q·k alone, and all blocks of keys are rotated by the same steps."""
    rope = scheme.rotary
    if scheme.bias or (rope is not None and (rope.decay is not None or by_rows(rope.remap))):
        return False
    rows = rope and rope.query_rows(range(1))
    regions = [region for region, _ in region_areas(scheme, rows) if region is not None]
    shifts = [k for region in regions if isinstance(k := region.k, Shift)]
    if len(shifts) < len(regions) or not all(isinstance(r.q, Shift) for r in regions):
        return False
    uneven = (k.floor and (k.modulo or k.divide != int(k.divide)) for k in shifts)
    return not any(uneven) and all(k.least is None for k in shifts)


def plan_for(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, length: int, lines: Sequence[Line],
    at: QueryPositions,
) -> DecodePlan | None:  # fmt: skip
    """Return the plan of queries at these positions over lines of keys, None if unsupported."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return None
    return _latest_plan(scheme, _sizes(q, k, v), length, lines, at)


@Latest  # reused by the other layers of a step
def _latest_plan(
    scheme: Scheme, sizes: Sizes, length: int, lines: Sequence[Line], at: QueryPositions
) -> DecodePlan | None:
    if _unsupported(scheme, sizes) is not None:
        return None
    (b, heads, nq, d), kv_heads, value_dim, (dtype, *_), device = sizes
    keys = kv_heads * sum(run.n for line in lines for run in line)
    keys *= b // len(lines)  # one line may serve all sequences
    kernel, rope, group = _kernel(), scheme.rotary, heads // kv_heads
    half, adjacent = (rope.dim(d) // 2, rope.pairs == "adjacent") if rope else (0, False)
    one_warp = kernel.fits_one_warp((d, half, value_dim), adjacent, group, nq, dtype, device)
    block = kernel.blocks_for(max(d, value_dim), dtype, group * nq, keys, one_warp).keys
    spec = TableSpec(d, length, torch.float32, device)
    last = lines[0][-1] if len(lines) == len(at) == nq == 1 and lines[0] else NO_RUN
    if scheme.causal and at[0] == (last.pos + last.n - 1,):
        # further steps will follow: STEPS positions are planned at once
        step = at[0][0] % STEPS
        extended = (*lines[0][:-1], last._replace(n=last.n + STEPS - 1 - step))
        steps = plan_steps(scheme, spec, (extended,), at[0][0] - step, block)
        if steps is not None:
            return steps.row(step)
    return make_decode_plan(scheme, spec, lines, at, block)


@lru_cache(maxsize=16)  # for texts decoded in turn, even under one scheme
def plan_steps(
    scheme: Scheme, spec: TableSpec, lines: tuple[Line, ...], first: int, block: int
) -> DecodePlan | None:
    """Plan one query at each of STEPS positions, a row each. The query is causal, so a line may
    contain keys that come later."""
    return make_decode_plan(scheme, spec, lines, [(first + n,) for n in range(STEPS)], block)


def run_kernel(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, plan: DecodePlan, scale: float,
    sinks: Tensor | None, padding: Tensor | None = None, **paged: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run attention by the kernel; `paged` holds a paged cache's block table and the output."""
    pairs = "half" if scheme.rotary is None else scheme.rotary.pairs
    return _kernel().decode(q, k, v, plan, pairs, scale, sinks, padding, **paged)


def run(p: AttentionInputs, plan: Any = None) -> Tensor:
    """Run a call of attention over contiguous positions by the kernel."""
    assert isinstance(p.q_pos, range) and isinstance(p.k_pos, range)
    assert isinstance(p.k_length, int)
    lines = ((Run(0, p.k_pos[0], len(p.k_pos)),),)
    scheme = _without_scale(p.scheme) if p.scheme.scale else p.scheme  # q carries it
    steps = plan_for(scheme, p.q, p.k, p.v, p.k_length, lines, (tuple(p.q_pos),))
    assert steps is not None
    return run_kernel(scheme, p.q, p.k, p.v, steps, p.scale, p.sink_logits, p.key_padding)


@lru_cache(maxsize=256)
def _without_scale(scheme: Scheme) -> Scheme:
    return replace(scheme, scale=())


@cache
def _kernel() -> Any:
    """Return the kernel's module, imported on first use: Triton may be missing."""
    return import_module("longitude.ops.kernels.decode")


def make_decode_plan(
    scheme: Scheme, spec: TableSpec, lines: Sequence[Line], at: QueryPositions, block: int
) -> DecodePlan | None:
    """Return the plan for a kernel that takes `block` keys at once. None if cached keys are already
    rotated for a different region, or positions are too large."""
    if any(run.pos < 0 or run.pos + run.n > MAX_POSITION for line in lines for run in line):
        return None
    nq = len(at[0])
    positions = torch.tensor(at if nq else [(0,)], dtype=torch.int64)  # no query: never read
    segments = _segments(scheme, lines, positions)
    if segments is None:
        return None
    rotations = [KeyRotation.of(key, block) for key in segments]
    distinct = tuple(dict.fromkeys(rotations))
    numbers, query_x = (np.stack(each, 1) for each in zip(*(
        _segment(key, rotation, distinct.index(rotation), positions, *own)
        for (key, own), rotation in zip(segments.items(), rotations, strict=True)
    ), strict=True))  # fmt: skip
    rows, order = len(numbers), np.arange(len(segments))[None]
    counts = numbers[..., COUNT]
    if not counts.all():  # a sequence's own segments first: it need not step through the others
        order = (counts == 0).argsort(1, kind="stable")[:, : max(1, (counts > 0).sum(1).max())]
        numbers, query_x = (np.take_along_axis(x, order[..., None], 1) for x in (numbers, query_x))
        counts = numbers[..., COUNT]
    ends = counts.cumsum(1)
    numbers[..., BEFORE] = ends - counts
    own = scheme.rotary and scheme.rotary.frequencies
    each = tuple(key.region and (key.region.frequencies or own) for key in segments)
    inv, gain = _inv_freq(scheme.rotary, each, spec.size, spec.length)
    angle = query_x[..., None] * inv[order]  # cos_sin would take ten times as many calls
    tables = np.concatenate([np.cos(angle), np.sin(angle)], 3) * gain[order]
    scaled = factors_fit_tables(scheme, spec.size)
    if scaled:
        factors = scale_factors(scheme, positions)[:, 0].numpy()  # of each query
        tables *= factors[:, None, :, None]
    size = numbers[0].size
    begin = size + -size % 4  # the kernel reads tables from a multiple of 16 bytes on
    packed = np.zeros((rows, begin + tables[0].size), np.int32)
    packed[:, :size] = numbers.reshape(rows, -1)
    packed.view(np.float32)[:, begin:] = tables.reshape(rows, -1)
    ints = torch.from_numpy(packed).to(spec.device, non_blocking=True)
    floats = ints.view(torch.float32)[:, begin:]
    last = int((counts + numbers[..., LEAD]).max())
    rounded = max(64, 1 << (last - 1).bit_length())  # seldom changes as a cache grows
    steps, starts = (_key_tables(scheme.rotary, distinct, block, spec, n) for n in (0, rounded))
    rotates = any(rotation.divide != math.inf for rotation in distinct)
    even = math.gcd(*(size for rotation in distinct for size in (rotation.span, rotation.chunk)))
    blocks = tuple(ends[:, -1].tolist())
    return DecodePlan(
        ints, floats, steps, starts, order.shape[1], nq, blocks, rotates, even, scaled
    )


def _segments(scheme: Scheme, lines: Sequence[Line], at: Tensor) -> Segments | None:
    """Return the segments of each sequence's line that its queries see; None if keys are rotated
    for another region."""
    rows, segments = max(len(lines), len(at)), {}
    regions = region_areas(scheme, scheme.rotary and scheme.rotary.query_rows(at))
    for m, frame in dict.fromkeys((m, run.frame) for line in lines for m, run in enumerate(line)):
        runs = [line[m] if m < len(line) else NO_RUN for line in lines]
        columns = [run[:3] if run.frame == frame else NO_RUN[:3] for run in runs]
        col, pos, n = np.array(columns).T[..., None]
        for region, areas in regions:
            for stretch, area in enumerate(areas):
                low, high = (x.numpy() for x in area.interval(at))
                low, high = np.maximum(low, pos), np.minimum(high, pos + n)
                visible = low < high
                if not visible.any():
                    continue
                if frame != (frame and region and frame_of(region)):
                    return None
                bounds = np.where(visible, (low, high), 0).transpose(1, 2, 0)
                key = SegmentKey(region, frame is not None, m, stretch)
                segments[key] = (
                    (col - pos)[:, 0],
                    np.broadcast_to(bounds, (rows, *bounds.shape[1:])),
                )
    # the kernel reads at least one segment
    empty = np.zeros(rows, np.int64), np.zeros((rows, at.shape[1], 2), np.int64)
    return segments or {SegmentKey(None, True, 0, 0): empty}


def frame_of(region: Region) -> Region:
    """Return a region's rotation of keys, as a region: several regions may share it."""
    return Region(k=region.k, frequencies=region.frequencies)


def _segment(
    key: SegmentKey, rotation: KeyRotation, index: int, at: Tensor, offset: Array, bounds: Array
) -> tuple[Array, Array]:
    """Return a segment's integers in every sequence as the kernel reads them (b FIELDS+2nq), and
    the x of each query relative to the segment's blocks (b nq)."""
    start, stop = bounds[..., 0], bounds[..., 1]
    high = stop.max(1)
    low = np.where(start < stop, start, high[:, None]).min(1)
    first = rotation.block(low)
    count = np.where(low < high, rotation.block(high - 1) - first + 1, 0)
    span, chunk, per_chunk = rotation.span, rotation.chunk, rotation.per_chunk
    wrap = per_chunk if rotation.modulo else MAX_POSITION
    fields = (0, count, index, first, offset, span, chunk, per_chunk, rotation.lead(first), wrap,
              low, high)  # fmt: skip
    numbers = np.empty((len(bounds), FIELDS + bounds[0].size), np.int64)
    numbers[:, FIELDS:] = bounds.reshape(len(bounds), -1)
    for n, field in enumerate(fields):
        numbers[:, n] = field
    query_x = np.zeros(start.shape)
    if key.region is not None:
        # a constant shift of all keys moves to the query, unless cached keys already have it
        k = key.region.k
        query_x += key.region.q(at).numpy() - (
            k.add if isinstance(k, Shift) and not key.rotated else 0
        )
        query_x -= rotation.base(first.astype(np.float64))[:, None]
    return numbers, query_x


@lru_cache(maxsize=64)
def _inv_freq(
    rope: Rope | None, each: tuple[Frequencies | None, ...], size: int, length: int
) -> tuple[Array, Array]:
    """Return inverse frequencies (segments 1 half) and gains (segments 1 1)."""
    half = 0 if rope is None else rope.dim(size) // 2
    inv, gain = np.zeros((len(each), 1, half)), np.ones((len(each), 1, 1))
    for n, frequencies in enumerate(each):
        if rope is not None and frequencies is not None:
            inv[n] = rope.inv_freq(rope.dim(size), length, frequencies).numpy()
            gain[n] = frequencies.gain(length)
    return inv, gain


@Memo
def _key_tables(
    rope: Rope | None, rotations: tuple[KeyRotation, ...], block: int, spec: TableSpec, blocks: int
) -> Tables:
    """Return tables (rotations n half) of the steps in a block, or of this many blocks."""
    n, half = blocks or block, 0 if rope is None else rope.dim(spec.size) // 2
    cos = torch.ones(len(rotations), n, half, device=spec.device)
    sin = torch.zeros_like(cos)
    each = torch.arange(n, dtype=torch.float64)[None]
    for f, rotation in enumerate(rotations):
        if rope is None or rotation.divide == math.inf:
            continue
        x = rotation.place(rotation.start(each) if blocks else each)
        region = Region(frequencies=rotation.frequencies)
        tables = cos_sin(
            rope, region, "k", x, spec.size, spec.length, dtype=cos.dtype, device=spec.device
        )
        cos[f], sin[f] = (t[0, 0] for t in tables)
    return cos, sin
