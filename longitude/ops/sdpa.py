"""One call of `scaled_dot_product_attention`: plain, under a mask, or with a bias in its heads.

A plain call is causal or full over contiguous positions. A mask covers what depends on more than
positions (a bias, padding, packed segments, positions in a tensor), in blocks of queries; for a
single query each key is rotated for its own region.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude.core.part import Term
from longitude.ops.eager import in_blocks
from longitude.ops.extra_dims import run_alibi, values_for, with_sums
from longitude.ops.inputs import BLOCK_SCORES, AttentionInputs
from longitude.ops.passes import Pass, accum_dtype, make_passes, single_query_pass
from longitude.ops.plan import Kernel, Plan
from longitude.parts.distance_bias import ByDistance

CUDA_BLOCK_SCORES = 2**27  # memory is plentiful on CUDA, but every call has overhead


def run(p: AttentionInputs, plan: Plan) -> Tensor:
    """Compute attention by one call, or by one call per block of queries under a mask."""
    (step,) = plan.steps
    if step.kernel is Kernel.SDPA_MASKED:
        return in_blocks(p, _masked, CUDA_BLOCK_SCORES if p.q.is_cuda else BLOCK_SCORES)
    if step.kernel is Kernel.SDPA_ALIBI:
        return run_alibi(p)
    (q, k), v = _one_pass(p).rotated(), p.v
    if plan.extra_dims:
        q, k = with_sums(p, q, k)
        v = values_for(q, v)
    return _sdpa(q, k, v, None, p, causal=step.tiles[0].kind == "lower")


def _one_pass(p: AttentionInputs) -> Pass:
    return single_query_pass(p) if p.q.shape[2] == 1 else make_passes(p)[0]


def _masked(p: AttentionInputs) -> Tensor:
    b, _, i, j = p.grid()
    q, k = _one_pass(p).rotated()
    v, shape = p.v, (*q.shape[:3], k.shape[2])
    if p.scheme.bias:  # a mask has q's type, and bfloat16 is off by whole units in a large bias
        q, k, v = (x.to(accum_dtype(x)) for x in (q, k, v))
    seen = p.mask()(b, i, j)
    sees_any = seen.any(-1, keepdim=True)
    mask = (seen | ~sees_any).expand(shape)  # a query without keys sees all and is zeroed below
    terms = [_dense(term, p).to(q.dtype) for term in p.terms().values()]
    if terms or p.sink_logits is not None:
        bias = sum(terms, q.new_zeros(()))
        mask = bias.expand(shape).masked_fill(~mask, float("-inf"))
    if p.sink_logits is not None:  # a zero key with the sink's logit as bias and a zero value
        sink = p.sink_logits.to(q.dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        mask = torch.cat([mask, sink], -1)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    return (_sdpa(q, k, v, mask, p) * sees_any).to(p.v.dtype)


def _dense(term: Term, p: AttentionInputs) -> Tensor:
    """Evaluate a term for every pair; one of the distance alone is read from its table."""
    if isinstance(term, ByDistance) and isinstance(p.q_pos, range) and isinstance(p.k_pos, range):
        return term.dense(p.q.shape[1], p.q_pos, p.k_pos)[None]
    return term(*p.grid())


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: AttentionInputs, causal: bool = False
) -> Tensor:
    """SDPA over grouped heads without repeating keys: groups become batches, or rows of a single
    query."""
    b, h, n, _ = q.shape
    hkv = k.shape[1]
    if h != hkv:
        shape = (b, hkv, h // hkv) if n == 1 else (b * hkv, h // hkv, n)
        q = q.reshape(*shape, -1)
        mask = None if mask is None else mask.reshape(*shape, -1)
        if n > 1:
            k, v = (x.flatten(0, 1)[:, None].expand(-1, h // hkv, -1, -1) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):  # it would round a wide bias to 8 bits
        out = sdpa(q, k, v, attn_mask=mask, dropout_p=p.dropout, is_causal=causal, scale=p.scale)
    return out.reshape(b, h, n, -1)
