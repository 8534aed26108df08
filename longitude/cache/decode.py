"""One query over a cache whose keys stay turned: a few plain calls over views of it, merged.

Each region that the query sees is a span of columns, on which its keys are turned already and the
query turns to the region's own position. Nothing is copied or masked; the parts of one softmax join
by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.attention import attention
from longitude.attention.operators import forward, operator_for
from longitude.attention.prepare import prepare
from longitude.attention.problem import Problem
from longitude.cache.keys import Keys, places
from longitude.cache.lines import Plan, Span, on_host, plan
from longitude.part import Banded, Pos, Region, Weights
from longitude.parts.rotary.tables import cos_sin
from longitude.parts.rotary.turn import turn
from longitude.scheme import Scheme

FEW = 8  # queries that go one by one, as when candidates of assisted decoding are checked
Part = tuple[Tensor, Tensor]  # an output (b h 1 d) and its log-sum-exp (b h 1)


def suits(scheme: Scheme, length: Any) -> bool:
    """Whether keys can stay turned under a scheme: how they turn must not change with the call."""
    rope = scheme.rotary
    if rope is None or rope.decay is not None or scheme.bias:
        return False
    return not rope.frequencies.by_length or isinstance(length, int)


def attend(
    scheme: Scheme, keys: Keys, v: Tensor, q: Tensor, q_pos: Pos, k_pos: Pos,
    weights: Weights | None, options: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """Attention over keys that stay turned, or None where the call does not fit."""
    k = keys.columns.view()
    if keys.lines is None or (torch.is_grad_enabled() and _learns(q, k, v)):
        return None
    one_frame = _one_frame(scheme)
    if (where := _one_by_one(keys, q, v, q_pos, options)) is None:
        return _bare(scheme, keys, v, q, q_pos, k_pos, weights, options) if one_frame else None
    if one_frame and q.is_cuda and len(keys.lines) > FEW:  # one call with a mask is faster
        return _bare(scheme, keys, v, q, q_pos, k_pos, weights, options)
    own = {name: options.get(name) for name in ("scale", "sink_logits")}
    p = prepare(scheme, q, k, v, q_pos, k_pos, weights, segments=None, length=keys.length, **own)
    if len(where) == 1:
        return _one(p, keys, where[0])
    return torch.cat([_one(p.rows(n, n + 1), keys, at) for n, at in enumerate(where)], 2)


def _learns(*tensors: Tensor) -> bool:
    return any(x.requires_grad for x in tensors)


def _one_frame(scheme: Scheme) -> bool:
    """Whether every key turns one way for good."""
    rope = scheme.rotary
    return rope is not None and rope.remap is None and not isinstance(rope.frequencies, Banded)


def _bare(
    scheme: Scheme, keys: Keys, v: Tensor, q: Tensor, q_pos: Pos, k_pos: Pos,
    weights: Weights | None, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Keys turn once and for all, and attention needs to know no more about it."""
    rope, dtype = scheme.rotary, torch.promote_types(q.dtype, torch.float32)
    assert rope is not None
    keys.settle(Region())
    cos, sin = cos_sin(
        rope, Region(), "q", q_pos, q.shape[-1], keys.length, dtype=dtype, device=q.device
    )
    bare, k = replace(scheme, rotary=None), keys.columns.view()
    return attention(bare, turn(q, cos, sin, rope.pairs), k, v, q_pos, k_pos, weights, **options)


def _one_by_one(
    keys: Keys, q: Tensor, v: Tensor, q_pos: Pos, options: dict[str, Any]
) -> list[tuple[int, ...]] | None:
    """Where each query stands, one number or one for each sequence; None where a query can't go by
    itself."""
    if options.get("softcap") or options.get("dropout") or options.get("segments") is not None:
        return None
    if options.get("backend", "auto") != "auto":
        return None
    if operator_for(q) is None or v.shape[-1] != q.shape[-1]:
        return None
    if q.shape[2] != 1 and (q.shape[2] > FEW or not keys.turned()):
        return None
    if isinstance(q_pos, range):
        return [(i,) for i in q_pos]
    rows = torch.atleast_2d(on_host(q_pos))
    return None if rows.is_floating_point() else [_same(c) for c in rows.T.tolist()]


def _same(values: list[int]) -> tuple[int, ...]:
    return tuple(values[:1] if len(set(values)) == 1 else values)


def _one(p: Problem, keys: Keys, at: tuple[int, ...]) -> Tensor:
    """One query, which stands at these positions."""
    lines = keys.lines or [()]
    rows = max(len(lines), len(at))
    each = zip(*(x * rows if len(x) < rows else x for x in (lines, at)), strict=True)
    plans = [plan(p.scheme, line, i) for line, i in each]
    keys.move([one.moves for one in plans], [one.line for one in plans])
    return _run(replace(p, k=keys.columns.view()), plans, at)


def _run(p: Problem, plans: list[Plan], at: tuple[int, ...]) -> Tensor:
    """The spans that each sequence sees, run and merged."""
    wanted: dict[tuple[Region, Span], list[int]] = {}
    for r, one in enumerate(plans):
        for part in one.shown:
            wanted.setdefault(part, []).append(r)
    turned = {region: _turned(p, region, at) for region, _ in wanted}
    every = all(len(rows) == len(plans) for rows in wanted.values())
    if every and len(wanted) == 1 and p.sink_logits is None:
        ((region, (start, stop)),) = wanted
        k, v = p.k[:, :, start:stop], p.v[:, :, start:stop]
        return sdpa(_grouped(turned[region], k), k, v, scale=p.scale).view(p.q.shape)
    parts = []
    for (region, span), rows in wanted.items():
        whole = len(rows) == len(plans)
        parts.append(
            _part(p, turned[region], span) if whole else _rows(p, turned[region], span, rows)
        )
    return _merged(p, parts) if parts else torch.zeros_like(p.q)


def _turned(p: Problem, region: Region, at: tuple[int, ...]) -> Tensor:
    """The query, turned to where it stands in a region."""
    rope, dtype = p.scheme.rotary, torch.promote_types(p.q.dtype, torch.float32)
    assert rope is not None
    tables = places(rope, region, "q", at, 1, p.q.shape[-1], p.q_length, dtype, p.q.device)
    return turn(p.q, *tables, rope.pairs)


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """A group of heads that share their keys as rows of one: keys are read once."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def _part(p: Problem, q: Tensor, span: Span, rows: slice = slice(None)) -> Part:
    """Some sequences' query over a span of columns."""
    operator, q = operator_for(q), q[rows]
    assert operator is not None
    k, v = (x[rows, :, span[0] : span[1]] for x in (p.k, p.v))
    ran = forward(operator, _grouped(q, k), k, v, False, p.scale)
    return ran.out.reshape(q.shape), ran.lse.reshape(q.shape[:3])


def _rows(p: Problem, q: Tensor, span: Span, rows: list[int]) -> Part:
    """Only some sequences see the span: each by itself, for the others there is nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for r in rows:
        out[r : r + 1], lse[r : r + 1] = _part(p, q, span, slice(r, r + 1))
    return out, lse


def _merged(p: Problem, parts: list[Part]) -> Tensor:
    """The parts of one softmax, and a sink's logit as one more whose value is nothing."""
    outs, lses = torch.stack([out for out, _ in parts]), [lse for _, lse in parts]
    if p.sink_logits is not None:
        lses.append(p.sink_logits.to(lses[0].dtype).view(1, -1, 1).expand_as(lses[0]))
    share = torch.stack(lses).softmax(0)[: len(parts), ..., None]
    share = share.nan_to_num()  # a sequence that sees nothing
    return (outs * share).sum(0).to(p.q.dtype)
