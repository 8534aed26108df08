"""The reference implementation: the full score matrix, with each region's scores, in one softmax.

Deliberately unlike the fast kernels: no passes are merged, so it can serve to check them. Works in
any precision, float64 included. Long calls run in blocks of queries, so that memory stays linear in
the number of keys; where gradients are needed, blocks are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.core.region import visible
from longitude.ops.inputs import BLOCK_SCORES, AttentionInputs, weights_of
from longitude.ops.passes import accum_dtype, make_passes
from longitude.ops.plan import Plan


@dataclass(frozen=True)
class Scores:
    """The terms of scores: the content product, each bias by name, their sum; and visibility."""

    content: Tensor
    biases: dict[str, Tensor]
    total: Tensor
    visible: Tensor


def scores(p: AttentionInputs) -> Scores:
    """Return the terms of every score (b h i j) in float32 at least, before the softmax."""
    dtype = accum_dtype(p.q)
    p = replace(p, q=p.q.to(dtype), k=p.k.to(dtype))
    b, h, i, j = p.grid()
    group = p.q.shape[1] // p.k.shape[1]
    content = p.q.new_zeros(())
    q_pos, k_pos = p.q_rows[:, :, None], p.k_rows[:, None, :]
    for each_pass in make_passes(p):
        q, k = each_pass.rotated()
        product = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * p.scale
        content = torch.where(visible(each_pass.areas, q_pos, k_pos)[:, None], product, content)
    shape = (*p.q.shape[:3], p.k.shape[2])
    biases = {
        name: term(b, h, i, j).to(p.q.dtype).expand(shape) for name, term in p.terms().items()
    }
    total = content.expand(shape)
    for bias in biases.values():
        total = total + bias
    if p.softcap:
        total = p.softcap * torch.tanh(total / p.softcap)
    return Scores(content.expand(shape), biases, total, p.mask()(b, i, j).expand(shape))


def run(p: AttentionInputs, plan: Plan | None = None) -> Tensor:
    """Compute attention, in blocks of queries where the score matrix would be large."""
    with torch.autocast(p.q.device.type, enabled=False):  # which would round scores to 8 bits
        return in_blocks(p, _run, BLOCK_SCORES)


def _run(p: AttentionInputs) -> Tensor:
    s = scores(p)
    weights = softmax(s.total, s.visible, p.sink_logits)
    weights = torch.nn.functional.dropout(weights, p.dropout) if p.dropout else weights
    return values(p, weights).to(p.v.dtype)


def values(p: AttentionInputs, weights: Tensor) -> Tensor:
    """Return the sum of values under these weights (b h i j)."""
    out = weights @ p.v.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1).to(weights.dtype)
    for part in p.scheme.bias:
        if getattr(part, "values", False):  # Shaw's also adds to the values
            weights_of_part = weights_of(part.name, p.weights)
            out = out + part.value_term(weights, p.q_rows, p.k_rows, weights_of_part)  # type: ignore[attr-defined]
    return out


def softmax(scores: Tensor, seen: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Return the softmax over the visible keys and a sink's logit, without the sink's weight; zeros
    for a query that sees nothing."""
    sees_any = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | ~sees_any), float("-inf"))
    if sink_logits is None:
        return torch.softmax(scores, -1) * sees_any
    sink = sink_logits.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] * sees_any


def in_blocks(p: AttentionInputs, run: Callable[[AttentionInputs], Tensor], largest: int) -> Tensor:
    """Run a call in blocks of queries of at most `largest` scores each: memory stays linear.

    Where gradients are needed a block is recomputed in the backward pass.
    """
    blocks = [p.rows(rows) for rows in query_blocks(p, largest)]
    if len(blocks) == 1:
        return run(p)
    if not torch.is_grad_enabled():
        return torch.cat([run(block) for block in blocks], 2)
    from torch.utils.checkpoint import checkpoint

    return torch.cat([checkpoint(run, block, use_reentrant=False) for block in blocks], 2)  # type: ignore[misc]


def query_blocks(p: AttentionInputs, largest: int) -> list[slice]:
    """Cut the queries of a call into blocks of at most `largest` scores."""
    batch, heads, nq, _ = p.q.shape
    size = max(1, largest // max(1, batch * heads * p.k.shape[2]))
    rope = p.scheme.rotary
    if rope and rope.decay:  # a block's gains must fit into float32
        size = max(1, min(size, int(rope.decay.span(rope.dim(p.q.shape[-1])))))
    return [slice(a, min(a + size, nq)) for a in range(0, nq, size)]
