"""The reference: the whole score matrix, each region's scores where it holds, one softmax.

Deliberately not the way of the fast backends: no passes are merged here, so it can hold them to
account. Works in any precision, float64 included. Long calls run in blocks of queries, so that
memory stays linear in the number of keys; where gradients are wanted a block is computed again
rather than kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longitude.core.region import visible
from longitude.ops.inputs import AttentionInputs, in_blocks
from longitude.ops.passes import make_passes

LARGEST = 2**23  # scores of one block


@dataclass(frozen=True)
class Scores:
    """What a score is made of: the content product, each bias by name, their sum, and who sees
    whom."""

    content: Tensor
    biases: dict[str, Tensor]
    total: Tensor
    visible: Tensor


def refuses(p: AttentionInputs) -> str | None:
    """Why this backend can't run the call: it can run every one."""
    return None


def scores(p: AttentionInputs) -> Scores:
    """The terms of every score (b h i j), before the softmax."""
    p = _wide(p)
    b, h, i, j = p.grid()
    heads = p.q.shape[1] // p.k.shape[1]
    content = p.q.new_zeros(())
    q_pos, k_pos = p.q_rows[:, :, None], p.k_rows[:, None, :]
    for one in make_passes(p):
        q, k = one.turned()
        product = q @ k.repeat_interleave(heads, 1).transpose(-1, -2) * p.scale
        content = torch.where(visible(one.areas, q_pos, k_pos)[:, None], product, content)
    shape = (*p.q.shape[:3], p.k.shape[2])
    biases = {
        name: term(b, h, i, j).to(p.q.dtype).expand(shape) for name, term in p.terms().items()
    }
    total = content.expand(shape)
    for bias in biases.values():
        total = total + bias
    if p.softcap:
        total = p.softcap * torch.tanh(total / p.softcap)
    return Scores(content.expand(shape), biases, total, p.visible(b, i, j).expand(shape))


def run(p: AttentionInputs) -> Tensor:
    """Attention, in blocks of queries where the score matrix would be large."""
    return in_blocks(p, _run, LARGEST)


def _wide(p: AttentionInputs) -> AttentionInputs:
    """The call in float32 at least."""
    wide = torch.promote_types(p.q.dtype, torch.float32)
    return p if p.q.dtype == wide else replace(p, q=p.q.to(wide), k=p.k.to(wide), v=p.v.to(wide))


def _run(given: AttentionInputs) -> Tensor:
    p = _wide(given)
    s = scores(p)
    weights = softmax(s.total, s.visible, p.sink_logits)
    weights = torch.nn.functional.dropout(weights, p.dropout) if p.dropout else weights
    v = p.v.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1)
    out = weights @ v
    for part, its in p.value_parts():
        out = out + part.value_term(weights, p.q_rows, p.k_rows, its)  # type: ignore[attr-defined]
    return out.to(given.v.dtype)


def softmax(scores: Tensor, seen: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax over the visible keys, a sink's logit beside them; a query that sees nothing gets
    zeros."""
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | ~some), float("-inf"))
    if sink_logits is None:
        return torch.softmax(scores, -1) * some
    sink = sink_logits.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] * some
