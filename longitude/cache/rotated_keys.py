"""A cache's keys, rotated in place as the last query needed them, and attention over them.

Where a key lies in a region depends on the key alone, so with fixed frequencies a rotated key stays
right until it enters another region: under plain RoPE, streaming and dual chunks never, under
ReRoPE and Self-Extend once in its life. A key is rotated from one frame to the next by the
difference of the angles, in float32 at least, and rounded once.

A few queries run by one kernel where there is one (`ops.decode`), over pre-RoPE keys that are
rotated as they are read. Elsewhere each region that a query sees is a span of columns whose keys
are rotated already: a few plain attention calls over views of the cache, merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.cache.decode_step import DecodeStep, latest_step, one_if_equal, rotation_between
from longitude.cache.kv_buffer import (
    Buffer,
    FrameChange,
    Span,
    index_spans,
    lines_of,
    merge_runs,
    select_columns,
    to_host,
)
from longitude.core.part import Pos, Region, Weights, by_rows
from longitude.core.scheme import Scheme
from longitude.ops import decode
from longitude.ops.attention import attention
from longitude.ops.decode import Line, Run, TableSpec
from longitude.ops.inputs import prepare
from longitude.ops.lse_merge import forward, operator_for
from longitude.parts.rope import Rope, apply_rotary
from longitude.parts.rotary_tables import cos_sin

BLOCK = 4096  # columns rotated at once: rotation needs memory for several copies
MAX_SEPARATE = 8  # queries that run one by one, as when assisted decoding checks candidates
Partial = tuple[Tensor, Tensor]  # an output (b h 1 d) and its log-sum-exp (b h 1)


class RotatedKeys:
    """Keys (b h n d), their positions and frames."""

    def __init__(self, rope: Rope | None, length: int) -> None:
        self.rope, self.length = rope, length
        self.buffer = Buffer(2)
        self.lines: list[Line] | None = [()]  # one for all sequences, or one each; None: no runs

    def append(self, k: Tensor, pos: Pos, padding: Tensor | None) -> None:
        """Add the pre-RoPE keys of new tokens."""
        new = lines_of(pos, padding, len(self.buffer)) if self.lines is not None else None
        if new is None and self.lines is not None:
            self.rotate_all(None)
        if new is None:
            self.lines = None
        else:  # one line for all becomes one each if rows differ
            old = self.lines or [()]
            rows = max(len(old), len(new))
            both = zip(*(x * rows if len(x) < rows else x for x in (old, new)), strict=True)
            self.lines = [merge_runs(a + b) for a, b in both]
        self.buffer.append(k)

    def any_rotated(self) -> bool:
        """Whether some key is not pre-RoPE."""
        return any(run.frame for run in _runs(self.lines))

    def pre_rope(self, share: bool = False) -> Tensor:
        """All keys pre-RoPE; `share` if the caller may hold on to them."""
        k = self.buffer.view()
        if self.any_rotated():
            k = k.clone()
            self._rotate_all(k, None)
        elif share:
            self.buffer.shared = True
        return k

    def table_spec(self) -> TableSpec:
        """Size, length, dtype and device of rotary tables for these keys."""
        k = self.buffer.view()
        accum_dtype = torch.promote_types(k.dtype, torch.float32)
        return TableSpec(k.shape[-1], self.length, accum_dtype, k.device)

    def apply(self, step: DecodeStep) -> Tensor:
        """Rotate the keys that a step changes; all keys, in their frames after it."""
        if step.updates:
            self.buffer.make_writable()
        k = self.buffer.view()
        for change, rows, starts, rotation in step.updates:
            some = k if rows is None else k[rows[0] : rows[0] + 1]
            if rotation is None:
                self._rotate(some, change, starts)
            else:
                columns = some[:, :, change.col : change.col + change.n]
                rotation(columns, out=columns)
        self.lines = step.lines
        return k

    def rotate_all(self, frame: Region | None) -> None:
        """Rotate every key to one frame."""
        if self.lines is not None and any(run.frame != frame for run in _runs(self.lines)):
            self.buffer.make_writable()
            self._rotate_all(self.buffer.view(), frame)
            self.lines = [merge_runs(r._replace(frame=frame) for r in line) for line in self.lines]

    def select(self, index: Tensor) -> None:
        """Keep these columns, in ascending order."""
        if self.lines is not None:
            spans = index_spans(index.cpu())
            self.lines = [select_columns(line, spans) for line in self.lines]
        self.buffer.select(index)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the batch dimension."""
        if self.lines is not None and len(self.lines) > 1:
            rows = change(torch.arange(len(self.lines))).tolist()
            self.lines = [self.lines[r] for r in rows]
        self.buffer.map_batch(change)

    def _rotate_all(self, k: Tensor, frame: Region | None) -> None:
        """Rotate k, which has our frames, to one frame; sequences with equal changes at once."""
        equal: dict[FrameChange, dict[int, int]] = {}
        for r, line in enumerate(self.lines or ()):
            for run in line:
                if run.frame != frame:
                    change = FrameChange(run.col, run.n, 0, run.frame, frame)
                    equal.setdefault(change, {})[r] = run.pos
        for change, starts in equal.items():
            if len(starts) == len(self.lines or ()):
                self._rotate(k, change, one_if_equal(tuple(starts.values())))
                continue
            for r, pos in starts.items():
                self._rotate(k[r : r + 1], change, (pos,))

    def _rotate(self, k: Tensor, change: FrameChange, starts: tuple[int, ...]) -> None:
        """Rotate columns in place, block by block."""
        assert self.rope is not None
        for done in range(0, change.n, BLOCK):
            n = min(BLOCK, change.n - done)
            columns = k[:, :, change.col + done : change.col + done + n]
            tables = rotation_between(self.rope, self.table_spec(), change, starts, done, n)
            columns.copy_(apply_rotary(columns, *tables, self.rope.pairs))


def _runs(lines: list[Line] | None) -> Iterator[Run]:
    return (run for line in lines or () for run in line)


class Query(NamedTuple):
    """The arguments of `Cache.attend`, and what is cached."""

    keys: RotatedKeys
    v: Tensor
    q: Tensor
    q_pos: Pos
    k_pos: Pos
    weights: Weights | None
    options: dict[str, Any]


class Decoder:
    """Attention over rotated keys, for the schemes that allow it."""

    def __init__(self, scheme: Scheme, length: Any) -> None:
        rope = scheme.rotary
        self.scheme, self.without_rope = scheme, replace(scheme, rotary=None)
        # the rotation of a key must not change with the call
        static = rope is not None and (not rope.frequencies.by_length or isinstance(length, int))
        self.supported = rope is not None and static and rope.decay is None and not scheme.bias
        # every key has one frame for good
        self.one_frame = rope is not None and rope.remap is None and not by_rows(rope.frequencies)

    def attend(self, query: Query) -> Tensor | None:
        """Attention over the cached keys, None if the call is not supported."""
        keys, v, q = query[:3]
        k = keys.buffer.view()
        if not self.supported or keys.lines is None or q.shape[0] != k.shape[0]:
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return None
        at = _query_positions(query)
        if at is not None and (out := self._by_kernel(query, at)) is not None:
            return out
        if q.shape[2] > decode.MAX_QUERIES and not keys.any_rotated():
            # if the kernel decodes after these queries, keys stay pre-RoPE
            if decode.unsupported_reason(self.scheme, q[:, :, :1], k, v) is None:
                return None
        separate = at if _separable(query) else None
        if self.one_frame and (separate is None or (q.is_cuda and len(keys.lines) > MAX_SEPARATE)):
            return self._in_one_frame(query)  # for many rows, one masked call is faster
        return None if separate is None else self._one_by_one(query, separate)

    def _in_one_frame(self, query: Query) -> Tensor:
        """Keys are rotated once and for all, and attention runs without rotation."""
        keys, v, q, q_pos, k_pos, weights, options = query
        rope, dtype = self.scheme.rotary, torch.promote_types(q.dtype, torch.float32)
        assert rope is not None
        keys.rotate_all(Region())
        cos, sin = cos_sin(
            rope, Region(), "q", q_pos, q.shape[-1], keys.length, dtype=dtype, device=q.device
        )
        q, k = apply_rotary(q, cos, sin, rope.pairs), keys.buffer.view()
        return attention(self.without_rope, q, k, v, q_pos, k_pos, weights, **options)

    def _one_by_one(self, query: Query, at: list[tuple[int, ...]]) -> Tensor:
        keys, (q, scale), outs = query.keys, self._scaled(query), []
        for n, positions in enumerate(at):
            step = latest_step(self.scheme, keys.table_spec(), keys.lines or [()], positions)
            one = q if len(at) == 1 else q[:, :, n : n + 1]
            sinks = query.options.get("sink_logits")
            outs.append(_run_step(step, one, keys.apply(step), query.v, scale, sinks))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _by_kernel(self, query: Query, at: list[tuple[int, ...]]) -> Tensor | None:
        """All queries over all visible keys by one kernel, if it supports them."""
        keys, v = query.keys, query.v
        k, rows = keys.buffer.view(), max(map(len, at))
        by_row = tuple(tuple(i[r % len(i)] for i in at) for r in range(rows))
        lines = tuple(keys.lines or ((),))
        plan = decode.plan_for(self.scheme, query.q, k, v, keys.length, lines, by_row)
        if plan is None:
            return None
        q, scale = self._scaled(query)
        return decode.run_kernel(
            self.scheme, q, k, v, plan, scale, query.options.get("sink_logits")
        )

    def _scaled(self, query: Query) -> tuple[Tensor, float]:
        """The queries times the factors of ④, and the softmax scale."""
        q, scale = query.q, query.options.get("scale")
        scale = self.scheme.softmax_scale(q.shape[-1]) if scale is None else scale
        if self.scheme.scale:
            own = {"scale": scale, "segments": None, "length": query.keys.length}
            k, (q_pos, k_pos, weights) = query.keys.buffer.view(), query[3:6]
            q = prepare(self.scheme, q, k, query.v, q_pos, k_pos, weights, **own).q
        return q, scale


def _query_positions(query: Query) -> list[tuple[int, ...]] | None:
    """The position of each query, one number or one per sequence; None if the softmax is not over
    q·k alone, or there are many queries."""
    q, options = query.q, query.options
    if options.get("softcap") or options.get("dropout") or options.get("segments") is not None:
        return None
    if options.get("backend", "auto") != "auto" or q.shape[2] > decode.MAX_QUERIES:
        return None
    if isinstance(query.q_pos, range):
        return [(i,) for i in query.q_pos]
    rows = torch.atleast_2d(to_host(query.q_pos))
    return None if rows.is_floating_point() else [one_if_equal(tuple(c)) for c in rows.T.tolist()]


def _separable(query: Query) -> bool:
    """Whether queries may run one by one over rotated keys."""
    keys, v, q = query[:3]
    if operator_for(q) is None or v.shape[-1] != q.shape[-1] or q.shape[1] % v.shape[1]:
        return False
    return q.shape[2] == 1 or (q.shape[2] <= MAX_SEPARATE and keys.any_rotated())


def _run_step(
    step: DecodeStep, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention to the spans that each sequence sees, merged."""
    rotated = step.queries(q).to(q.dtype)
    # heads that share their keys as rows of one: keys are read once
    rotated = rotated.reshape(-1, q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[3])
    if len(step.spans) == 1 and step.spans[0].rows is None and sinks is None:
        # not SDPA: on Hopper it takes cuDNN's, which plans anew at each length, for milliseconds
        return _attend(rotated[0], k, v, step.spans[0].span, scale)[0].reshape(q.shape)
    partials = []
    for query, span, rows in step.spans:
        if rows is None:
            partials.append(_attend(rotated[query], k, v, span, scale))
            continue
        shape = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
        out, lse = q.new_zeros(*shape, q.shape[3]), None
        for r in (slice(row, row + 1) for row in rows):
            out[r], own = _attend(rotated[query, r], k[r], v[r], span, scale)
            lse = own.new_full(shape, -torch.inf) if lse is None else lse  # others see nothing
            lse[r] = own
        assert lse is not None
        partials.append((out, lse))
    if not partials:
        return torch.zeros_like(q)
    lses = [lse for _, lse in partials]
    if sinks is not None:  # a sink's logit is one more part of the softmax, whose value is zero
        lses.append(sinks.to(lses[0].dtype).view(1, *lses[0].shape[1:]).expand_as(lses[0]))
    share = torch.stack(lses).softmax(0)
    if any(rows is not None for _, _, rows in step.spans):  # a sequence may see nothing at all
        share = share.nan_to_num()
    outs = torch.stack([out for out, _ in partials])
    return (outs * share[: len(partials), ..., None]).sum(0).to(q.dtype).reshape(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Partial:
    """A query over a span of columns."""
    operator = operator_for(q)
    assert operator is not None
    ran = forward(operator, q, k[:, :, span[0] : span[1]], v[:, :, span[0] : span[1]], False, scale)
    return ran.out, ran.lse
