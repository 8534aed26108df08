"""Biases in extra head dimensions, so that plain kernels add them to each score.

Numbers are split into parts of the type of q and k, the largest first, for 24 bits in all or more.

ALiBi: softmax ignores a number that is added to a whole row, so -m (i - j) may be replaced by
m (j - c) for any c, a product of a factor of the head and a factor of the key, as q·k is. Queries
get the slope m, keys their distance to the last one, each in three parts; every product of two
parts takes one dimension, nine padded to sixteen. Far from c, float32 has few bits left for q·k, so
the plan declines calls with large biases.

Forget gates: c_i - c_j, where c are sums of log-gates, is Σ over the parts of (part of c_i)·1 +
1·(-part of c_j): two dimensions for each part. They come first in the head and in this order, so
that large sums cancel before q·k is added: the error is that of plain attention, however large they
grow. As c_i is in the score, the log-sum-exp is that of the full score: merging and sinks need it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.core.part import Bias, Weights
from longitude.ops.inputs import AttentionInputs
from longitude.ops.passes import ALL, make_passes
from longitude.parts.distance_bias import ByDistance

HALF_DIMS = 16  # tensor cores take head dimensions in multiples of 16
WIDE_DIMS = 4
ALIBI_PARTS = 3
SUM_PARTS = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 3}
UNIT = 256  # distances and sums are divided by it: 131,072 would not fit into float16


def run_alibi(p: AttentionInputs) -> Tensor:
    """Run one causal call whose heads carry the bias."""
    q, k = make_passes(p)[0].rotated()
    slopes = slopes_of(p.scheme.bias[0], q.shape[1]).to(q.device) * (UNIT / p.scale)
    distances = torch.arange(1 - k.shape[2], 1, device=q.device, dtype=torch.float64) / UNIT
    of_q, of_k = (in_parts(x, q.dtype, ALIBI_PARTS) for x in (slopes, distances))
    q = torch.cat([q, _padded(of_q.repeat_interleave(ALIBI_PARTS, -1)[:, None], q, HALF_DIMS)], -1)
    k = torch.cat([k, _padded(of_k.repeat(1, ALIBI_PARTS), k, HALF_DIMS)], -1)
    v = p.v if p.q.is_cuda else pad(p.v, (0, q.shape[-1] - p.v.shape[-1]))  # a CPU needs one size
    grouped = q.shape[1] != k.shape[1]
    out = sdpa(q, k, v, is_causal=True, dropout_p=p.dropout, scale=p.scale, enable_gqa=grouped)
    return out[..., : p.v.shape[-1]]


@lru_cache(maxsize=64)
def slopes_of(part: Bias, heads: int) -> Tensor:
    """Return what a linear bias subtracts per unit of distance, one number per head, in float64."""
    qk, pos = torch.zeros(1, heads, 1, 1, dtype=torch.float64), torch.zeros(1, 1)
    none: Weights = {}
    term = part.term(qk, qk, pos, pos, none, 1.0)
    assert isinstance(term, ByDistance)
    return -term.value(torch.arange(heads), torch.ones(1))


def sum_dims(dtype: torch.dtype) -> int:
    """Return how many dimensions forget sums take in heads of this type."""
    return HALF_DIMS if dtype in (torch.float16, torch.bfloat16) else WIDE_DIMS


def with_sums(
    p: AttentionInputs, q: Tensor, k: Tensor, rows: slice = ALL, columns: slice = ALL
) -> tuple[Tensor, Tensor]:
    """Prepend forget sums to rotated rows of q and columns of k; keys are repeated per query head.

    Only differences of sums matter, so all are taken relative to the middle query's sum.
    """
    assert p.forget_sums is not None
    of_q, of_k = p.forget_sums
    middle = of_q[..., of_q.shape[-1] // 2, None].detach().double()
    if p.sink_logits is None:  # a row's sum is zero: so is c_i's gradient, exactly
        of_q = of_q.detach() + 0 * of_q
    extra = []
    for n, (sums, cut) in enumerate(((of_q, rows), (of_k, columns))):
        c = (sums[..., cut].double() - middle) / (p.scale * UNIT)
        parts = in_parts(c if n == 0 else -c, q.dtype, SUM_PARTS[q.dtype])
        pairs = (parts, torch.full_like(parts, UNIT))
        extra.append(torch.stack(pairs if n == 0 else pairs[::-1], -1).flatten(-2))
    size, k = sum_dims(q.dtype), k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    q, k = (torch.cat([_padded(own, x, size), x], -1) for own, x in zip(extra, (q, k), strict=True))
    return q, k


def values_for(q: Tensor, v: Tensor) -> Tensor:
    """Return values for each head of q, padded to the width of q."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return pad(v, (0, q.shape[-1] - v.shape[-1]))


def in_parts(x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Split numbers into `count` summands of a narrower type, the largest first. Gradients pass
    through the first alone, since all parts enter a score in the same way."""
    parts = []
    for _ in range(count):
        parts.append(x.to(dtype))
        x = (x - parts[-1].to(x.dtype)).detach()
    return torch.stack(parts, -1)


def _padded(extra: Tensor, x: Tensor, size: int) -> Tensor:
    """Return extra dimensions for each head and token of x, padded with zeros."""
    return pad(extra, (0, size - extra.shape[-1])).expand(*x.shape[:3], size)
