"""A few queries over a cache: by one kernel, or by a few plain calls over views of it, merged.

Where our kernel runs, keys stay as they came and turn as they are read. Elsewhere they stay turned:
each region that a query sees is a span of columns, on which its keys are turned already and the
query turns to the region's own position. Nothing is copied or masked; the parts of one softmax join
by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longitude.cache.decode_step import Step, same, step
from longitude.cache.position_runs import Span, on_host
from longitude.cache.rotated_keys import Keys
from longitude.core.part import Pos, Region, Weights, by_rows
from longitude.core.scheme import Scheme
from longitude.ops import decode as decoding
from longitude.ops.attention import attention
from longitude.ops.inputs import prepare
from longitude.ops.lse_merge import forward, operator_for
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

FEW = 8  # queries that go one by one, as when candidates of assisted decoding are checked
Joint = tuple[Tensor, Tensor]  # an output (b h 1 d) and its log-sum-exp (b h 1)


class Query(NamedTuple):
    """What `attend` was given."""

    q: Tensor
    q_pos: Pos
    k_pos: Pos
    weights: Weights | None
    options: dict[str, Any]


class Decoder:
    """Attention over keys that stay turned, as far as a scheme lets them."""

    def __init__(self, scheme: Scheme, length: Any) -> None:
        rope = scheme.rotary
        self.scheme, self.bare = scheme, replace(scheme, rotary=None)
        # how a key turns must not change with the call
        static = rope is not None and (not rope.frequencies.by_length or isinstance(length, int))
        self.suits = rope is not None and static and rope.decay is None and not scheme.bias
        # every key turns one way for good
        self.one_frame = rope is not None and rope.remap is None and not by_rows(rope.frequencies)

    def attend(self, keys: Keys, v: Tensor, query: Query) -> Tensor | None:
        """Attention over what is kept, or None where the call does not fit."""
        q, k = query.q, keys.columns.view()
        if not self.suits or keys.lines is None or q.shape[0] != k.shape[0]:
            return None
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            return None
        places = _places(query)
        if places is not None and (out := self._fused(keys, v, query, places)) is not None:
            return out
        if q.shape[2] > decoding.MAX_QUERIES and not keys.turned() and self._later(q, k, v):
            return None
        where = places if _alone(keys, v, query) else None
        if self.one_frame and (where is None or (q.is_cuda and len(keys.lines) > FEW)):
            return self._bare(keys, v, query)  # for many rows, one call with a mask is faster
        return None if where is None else self._one_by_one(keys, v, query, where)

    def _bare(self, keys: Keys, v: Tensor, query: Query) -> Tensor:
        """Keys turn once and for all, and attention needs to know no more about it."""
        q, q_pos, k_pos, weights, options = query
        rope, dtype = self.scheme.rotary, torch.promote_types(q.dtype, torch.float32)
        assert rope is not None
        keys.settle(Region())
        cos, sin = cos_sin(
            rope, Region(), "q", q_pos, q.shape[-1], keys.length, dtype=dtype, device=q.device
        )
        q, k = apply_rotary(q, cos, sin, rope.pairs), keys.columns.view()
        return attention(self.bare, q, k, v, q_pos, k_pos, weights, **options)

    def _one_by_one(
        self, keys: Keys, v: Tensor, query: Query, where: list[tuple[int, ...]]
    ) -> Tensor:
        q, scale = self._scaled(keys, v, query)
        done = []
        for n, at in enumerate(where):
            now = step(self.scheme, keys.head(), keys.lines or [()], at)
            one = q if len(where) == 1 else q[:, :, n : n + 1]
            sinks = query.options.get("sink_logits")
            done.append(_run(now, one, keys.follow(now), v, scale, sinks))
        return done[0] if len(done) == 1 else torch.cat(done, 2)

    def _fused(
        self, keys: Keys, v: Tensor, query: Query, places: list[tuple[int, ...]]
    ) -> Tensor | None:
        """All queries over all that they see, by one kernel, if it suits."""
        k, rows = keys.columns.view(), max(map(len, places))
        at = tuple(tuple(i[r % len(i)] for i in places) for r in range(rows))
        lines = tuple(keys.lines or ((),))
        seen = decoding.plan_for(self.scheme, query.q, k, v, keys.length, lines, at)
        if seen is None:
            return None
        q, scale = self._scaled(keys, v, query)
        return decoding.run(self.scheme, q, k, v, seen, scale, query.options.get("sink_logits"))

    def _later(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the kernel will decode after these queries: keys then need not turn for good."""
        return decoding.unsupported_reason(self.scheme, q[:, :, :1], k, v) is None

    def _scaled(self, keys: Keys, v: Tensor, query: Query) -> tuple[Tensor, float]:
        """The queries with the scale of ④ in them, and the softmax's own."""
        q, scale = query.q, query.options.get("scale")
        scale = self.scheme.softmax_scale(q.shape[-1]) if scale is None else scale
        if self.scheme.scale:
            own = {"scale": scale, "segments": None, "length": keys.length}
            k = keys.columns.view()
            p = prepare(self.scheme, q, k, v, query.q_pos, query.k_pos, query.weights, **own)
            q = p.q
        return q, scale


def _places(query: Query) -> list[tuple[int, ...]] | None:
    """Where each query stands, one number or one for each sequence; None where the softmax is not
    over q·k alone, or queries are many."""
    q, options = query.q, query.options
    if options.get("softcap") or options.get("dropout") or options.get("segments") is not None:
        return None
    if options.get("backend", "auto") != "auto":
        return None
    if q.shape[2] > decoding.MAX_QUERIES:
        return None
    if isinstance(query.q_pos, range):
        return [(i,) for i in query.q_pos]
    rows = torch.atleast_2d(on_host(query.q_pos))
    return None if rows.is_floating_point() else [same(tuple(c)) for c in rows.T.tolist()]


def _alone(keys: Keys, v: Tensor, query: Query) -> bool:
    """Whether queries may go one by one, over keys that stay turned."""
    q = query.q
    if operator_for(q) is None or v.shape[-1] != q.shape[-1] or q.shape[1] % v.shape[1]:
        return False
    return q.shape[2] == 1 or (q.shape[2] <= FEW and keys.turned())


def _run(now: Step, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """The spans that each sequence sees, run and merged."""
    turned = now.queries(q).to(q.dtype)
    # a group of heads that share their keys as rows of one: keys are read once
    turned = turned.reshape(-1, q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[3])
    if len(now.parts) == 1 and now.parts[0].rows is None and sinks is None:
        # not SDPA: on Hopper it takes cuDNN's, which plans anew at each length, milliseconds long
        return _look(turned[0], k, v, now.parts[0].span, scale)[0].reshape(q.shape)
    joints = []
    for query, span, rows in now.parts:
        every = [slice(None)] if rows is None else [slice(r, r + 1) for r in rows]
        found = [_look(turned[query, r], k[r], v[r], span, scale) for r in every]
        joints.append(found[0] if rows is None else _among(q, k, every, found))
    if not joints:
        return torch.zeros_like(q)
    some = any(rows is not None for _, _, rows in now.parts)
    return _merged(joints, q, sinks, some)


def _look(q: Tensor, k: Tensor, v: Tensor, span: Span, scale: float) -> Joint:
    """A query over a span of columns."""
    operator = operator_for(q)
    assert operator is not None
    ran = forward(operator, q, k[:, :, span[0] : span[1]], v[:, :, span[0] : span[1]], False, scale)
    return ran.out, ran.lse


def _among(q: Tensor, k: Tensor, rows: list[slice], found: list[Joint]) -> Joint:
    """What some sequences saw among all; the others saw nothing."""
    shape = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
    out, lse = q.new_zeros(*shape, q.shape[3]), found[0][1].new_full(shape, -torch.inf)
    for r, (own, total) in zip(rows, found, strict=True):
        out[r], lse[r] = own, total
    return out, lse


def _merged(joints: list[Joint], q: Tensor, sinks: Tensor | None, some: bool) -> Tensor:
    """The parts of one softmax, and a sink's logit as one more whose value is nothing."""
    lses = [lse for _, lse in joints]
    if sinks is not None:
        lses.append(sinks.to(lses[0].dtype).view(1, *lses[0].shape[1:]).expand_as(lses[0]))
    share = torch.stack(lses).softmax(0)
    if some:  # sequences may see nothing at all
        share = share.nan_to_num()
    outs = torch.stack([out for out, _ in joints])
    return (outs * share[: len(joints), ..., None]).sum(0).to(q.dtype).reshape(q.shape)
