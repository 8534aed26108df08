"""FlexAttention: terms and masks that no ready-made kernel knows, compiled for the GPU.

Each pass is one flex call with the bias as its score modification and its areas as its block mask;
passes merge by their log-sum-exp, which flex differentiates. On CPU it runs uncompiled,
materialises the scores and has no backward: that is for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longitude.attention.lower import Pass, lower
from longitude.attention.problem import Problem
from longitude.region import visible


def refuses(p: Problem) -> str | None:
    """Why flex can't run the call, or None."""
    if p.value_parts():
        return "Shaw's value side needs the whole row of weights"
    if p.dropout:
        return "flex has no dropout"
    if any(getattr(part, "grows", False) for part in p.scheme.bias):
        return "its table of distances would take memory that grows with n²"
    if p.q.device.type == "cpu" and torch.is_grad_enabled() and _wants_grad(p):
        return "uncompiled flex has no backward on CPU"
    if p.overflows:
        return "the decay over so many queries at once would overflow float32"
    if p.q.shape[-1] < 16 and p.q.is_cuda:
        return "compiled flex needs heads of at least 16"
    return None


def _wants_grad(p: Problem) -> bool:
    return any(t.requires_grad for t in (p.q, p.k, p.v, *p.weights.values()))


def run(p: Problem) -> Tensor:
    """Attention, pass by pass."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    wide = torch.promote_types(p.v.dtype, torch.float32)
    out, lse = None, None
    modify = _score_mod(p)
    for one in lower(p):
        more, more_lse = _pass(p, one, modify)
        more, more_lse = more.to(wide), more_lse.to(wide)
        if out is None or lse is None:
            out, lse = more, more_lse
            continue
        weight = torch.sigmoid(_difference(more_lse, lse))
        out = out + weight[..., None] * (more - out)
        lse = torch.logaddexp(lse, more_lse)
    assert out is not None and lse is not None
    if p.sink_logits is not None:
        out = out * torch.sigmoid(lse - p.sink_logits.to(wide)[:, None])[..., None]
    return out.to(p.v.dtype)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b, with a row that neither part sees counted to the first."""
    none = torch.isneginf(a) & torch.isneginf(b)
    return torch.where(none, torch.zeros_like(a), a - b)


def _pass(p: Problem, one: Pass, modify: Callable[..., Tensor] | None) -> tuple[Tensor, Tensor]:
    q, k = one.turned()
    flex, block_mask = _compiled(p.q.is_cuda)
    sizes = (p.q.shape[0], None, p.q.shape[2], p.k.shape[2])
    seen = block_mask(_mask_mod(p, one), *sizes, device=p.q.device)
    grouped = p.q.shape[1] != p.k.shape[1]
    return flex(
        q.contiguous(),
        k.contiguous(),
        p.v.contiguous(),
        modify,
        seen,
        p.scale,
        grouped,
        return_lse=True,
    )


def _mask_mod(p: Problem, one: Pass) -> Callable[..., Tensor]:
    q_pos, k_pos = p.q_rows, p.k_rows
    padding, segments = p.key_padding, p.segments

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        qi = q_pos[0][i] if q_pos.shape[0] == 1 else q_pos[b, i]
        kj = k_pos[0][j] if k_pos.shape[0] == 1 else k_pos[b, j]
        seen = visible(one.areas, qi, kj)
        seen = seen if padding is None else seen & ~padding[b, j]
        return seen if segments is None else seen & (segments[0][b, i] == segments[1][b, j])

    return mask


def _score_mod(p: Problem) -> Callable[..., Tensor] | None:
    terms = list(p.terms().values())
    if not terms and not p.softcap:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for term in terms:
            score = score + term(b, h, i, j).to(score.dtype)
        return p.softcap * torch.tanh(score / p.softcap) if p.softcap else score

    return modify


@lru_cache(maxsize=2)
def _compiled(cuda: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """flex_attention and create_block_mask, compiled on the GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not cuda:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)
