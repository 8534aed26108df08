"""What one would use instead of a scheme's attention: published code, FlexAttention, a dense bias
through SDPA, flash-attn's own slopes and windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.suites.baselines import Qkv
from benchmarks.suites.case import Way
from benchmarks.suites.peers import Unfit, found, peer
from benchmarks.suites.setup import Setup
from benchmarks.suites.timing import Run
from longitude.core.region import visible
from longitude.core.scheme import Scheme
from longitude.ops.attention import attention
from longitude.ops.inputs import prepare
from longitude.ops.passes import make_passes
from longitude.parts import T5, Alibi
from longitude.parts.biases import slopes

DENSE = 2**31  # scores that a way may hold at once
FLEX = 8192  # tokens
Weights = dict[str, Tensor]


def peers_of(
    setup: Setup,
    scheme: Scheme,
    qkv: Qkv,
    weights: Weights,
    window: int | None,
    judge: Callable[[Any], float],
) -> list[Way]:
    """The ways that fit a scheme; `window` where it sees no further."""
    ways, bias = [], scheme.bias[0] if scheme.bias else None
    if scheme.rotary and scheme.rotary.remap and window is None:
        ways.append(peer("published code, eager", "", partial(_published, scheme, qkv), judge))
    if setup.cuda and setup.compiles and _worth_compiling(scheme, qkv):
        run = partial(_flex, scheme, qkv, weights)
        ways.append(peer("FlexAttention", "torch", lambda: run, judge))
    if isinstance(bias, T5 | Alibi):
        make = partial(_dense, bias, qkv, weights)
        ways.append(peer("x-transformers' bias + SDPA", "x_transformers", make, judge))
    if setup.cuda and isinstance(bias, Alibi):
        make = partial(_flash, qkv, alibi_slopes=slopes(qkv[0].shape[1]).float().to(setup.device))
        ways.append(peer("flash-attn's slopes", "flash_attn", make, judge))
    if setup.cuda and not bias:
        make, name = partial(_flash4, qkv, window), "FlashAttention 4, no rotation"
        ways.append(peer(name + ("" if window is None else ", no sinks"), "flash_attn", make))
    if setup.cuda and window is not None:
        make = partial(_flash, qkv, window_size=(window - 1, 0))
        ways.append(peer("flash-attn's window, no rotation, no sinks", "flash_attn", make))
    return ways


def _worth_compiling(scheme: Scheme, qkv: Qkv) -> bool:
    """Flex compiles for each scheme and length, some seconds long: at the shortest length, and
    where it is not our own way already."""
    known = not scheme.bias or isinstance(scheme.bias[0], T5 | Alibi)
    plain = scheme.rotary is not None and not scheme.rotary.remap and len(scheme.areas()) == 1
    return known and not plain and qkv[0].shape[2] <= FLEX


def _published(scheme: Scheme, qkv: Qkv) -> Run:
    """As the papers' repositories compute it: a matrix of scores for each region, a choice, a
    softmax."""
    q, k, v = qkv
    n = q.shape[2]
    if q.shape[0] * q.shape[1] * n * n > DENSE:
        raise Unfit("its matrices of scores would not fit into memory")
    p = prepare(scheme, q, k, v, range(n), range(n))
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
    group = q.shape[1] // k.shape[1]

    def run() -> Tensor:
        scores = q.new_full((), float("-inf"))
        for one in make_passes(p):
            a, b = one.rotated()
            product = a @ b.repeat_interleave(group, 1).mT * p.scale
            scores = torch.where(visible(one.areas, i, j), product, scores)
        return scores.softmax(-1, torch.float32).to(q.dtype) @ v.repeat_interleave(group, 1)

    return run


def _flex(scheme: Scheme, qkv: Qkv, weights: Weights) -> Tensor:
    """A Flex call a region; biases of the distance are looked up."""
    n = qkv[0].shape[2]
    return attention(scheme, *qkv, range(n), range(n), weights, backend="flex")


def _dense(bias: T5 | Alibi, qkv: Qkv, weights: Weights) -> Run:
    """The bias of every pair as SDPA's mask; making it is not timed."""
    q, k, v = qkv
    heads, n = q.shape[1], q.shape[2]
    names = ("AlibiPositionalBias", "RelativePositionBias")
    alibi, relative = found("x_transformers.x_transformers", *names)
    if heads * n * n > DENSE:
        raise Unfit("its bias of every pair would not fit into memory")
    if isinstance(bias, Alibi):
        module = alibi(heads, heads)
    else:
        how = {"num_buckets": bias.buckets, "max_distance": bias.max_distance, "heads": heads}
        module = relative(1.0, causal=True, **how)
        module.relative_attention_bias.weight.data.copy_(weights["t5.table"])
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    mask = module.to(q.device)(n, n).to(q.dtype).masked_fill(hidden, float("-inf"))
    return lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=heads != k.shape[1])


def _flash(qkv: Qkv, **options: Any) -> Run:
    (apply,) = found("flash_attn", "flash_attn_func")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return lambda: apply(q, k, v, causal=True, **options).transpose(1, 2)


def _flash4(qkv: Qkv, window: int | None) -> Run:
    """Causal attention, which remaps and other frequencies change the scores of, not the cost."""
    (apply,) = found("flash_attn.cute", "flash_attn_func")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    seen = (None if window is None else window - 1, 0)
    return lambda: apply(q, k, v, causal=True, window_size=seen)[0].transpose(1, 2)
