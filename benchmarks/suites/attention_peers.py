"""Peers of attention under a scheme: published code, FlexAttention, SDPA with a dense bias, and
flash-attn's own ALiBi slopes and windows."""

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

DENSE = 2**31  # scores that a method may hold in memory at once
FLEX = 8192  # tokens up to which FlexAttention is compiled and measured
Weights = dict[str, Tensor]


def peers_of(
    setup: Setup,
    scheme: Scheme,
    qkv: Qkv,
    weights: Weights,
    window: int | None,
    judge: Callable[[Any], float],
) -> list[Way]:
    """Return the peers that fit a scheme; `window` is set if queries see no key further away."""
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
    """Whether to measure FlexAttention, which compiles for some seconds for each scheme and length:
    up to FLEX tokens, not for plain attention, and of the biases only for T5's and ALiBi's, since
    FlexAttention is our own choice for some of the others."""
    known = not scheme.bias or isinstance(scheme.bias[0], T5 | Alibi)
    plain = scheme.rotary is not None and not scheme.rotary.remap and len(scheme.areas()) == 1
    return known and not plain and qkv[0].shape[2] <= FLEX


def _published(scheme: Scheme, qkv: Qkv) -> Run:
    """Attention as the papers' repositories compute it: a score matrix per region, a choice between
    them for each pair, one softmax."""
    q, k, v = qkv
    n = q.shape[2]
    if q.shape[0] * q.shape[1] * n * n > DENSE:
        raise Unfit("its matrices of scores would not fit into memory")
    p = prepare(scheme, q, k, v, range(n), range(n))
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
    group = q.shape[1] // k.shape[1]

    def run() -> Tensor:
        scores = q.new_full((), float("-inf"))
        for region in make_passes(p):
            q_rotated, k_rotated = region.rotated()
            product = q_rotated @ k_rotated.repeat_interleave(group, 1).mT * p.scale
            scores = torch.where(visible(region.areas, i, j), product, scores)
        return scores.softmax(-1, torch.float32).to(q.dtype) @ v.repeat_interleave(group, 1)

    return run


def _flex(scheme: Scheme, qkv: Qkv, weights: Weights) -> Tensor:
    """One FlexAttention call per region; biases by distance are looked up in a table."""
    n = qkv[0].shape[2]
    return attention(scheme, *qkv, range(n), range(n), weights, backend="flex")


def _dense(bias: T5 | Alibi, qkv: Qkv, weights: Weights) -> Run:
    """SDPA with the bias of every pair as its mask; building the mask is not timed."""
    q, k, v = qkv
    heads, n = q.shape[1], q.shape[2]
    names = ("AlibiPositionalBias", "RelativePositionBias")
    alibi, relative = found("x_transformers.x_transformers", *names)
    if heads * n * n > DENSE:
        raise Unfit("its bias of every pair would not fit into memory")
    if isinstance(bias, Alibi):
        module = alibi(heads, heads)
    else:
        kwargs = {"num_buckets": bias.buckets, "max_distance": bias.max_distance, "heads": heads}
        module = relative(1.0, causal=True, **kwargs)
        module.relative_attention_bias.weight.data.copy_(weights["t5.table"])
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    mask = module.to(q.device)(n, n).to(q.dtype).masked_fill(hidden, float("-inf"))
    return lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=heads != k.shape[1])


def _flash(qkv: Qkv, **options: Any) -> Run:
    (apply,) = found("flash_attn", "flash_attn_func")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return lambda: apply(q, k, v, causal=True, **options).transpose(1, 2)


def _flash4(qkv: Qkv, window: int | None) -> Run:
    """Causal attention without rotation: a scheme's rotation changes its scores, not its cost."""
    (apply,) = found("flash_attn.cute", "flash_attn_func")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    window_size = (None if window is None else window - 1, 0)
    return lambda: apply(q, k, v, causal=True, window_size=window_size)[0].transpose(1, 2)
