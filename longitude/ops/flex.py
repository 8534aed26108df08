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

from longitude.core.part import Term
from longitude.ops.block_mask import block_mask
from longitude.ops.inputs import AttentionInputs, contiguous
from longitude.ops.passes import Pass, make_passes
from longitude.parts.distance_bias import ByDistance

RECOMPILES = (
    1024  # every scheme is a compilation of its own; past dynamo's limit of 8 it would give up
)


def refuses(p: AttentionInputs) -> str | None:
    """Why flex can't run the call, or None."""
    if p.value_parts():
        return "Shaw's value side needs the whole row of weights"
    if p.dropout:
        return "flex has no dropout"
    if any(getattr(part, "grows", False) for part in p.scheme.bias):
        return "its table of distances would take memory that grows with n²"
    if _wants_grad(p) and p.q.device.type == "cpu":
        return "uncompiled flex has no backward on CPU"
    if _wants_grad(p) and any(getattr(part, "many_reads", False) for part in p.scheme.bias):
        return "compiled flex can't differentiate a weight that a term reads several times"
    if p.overflows:
        return "the decay over so many queries at once would overflow float32"
    if p.q.shape[-1] < 16 and p.q.is_cuda:
        return "compiled flex needs heads of at least 16"
    return None


def _wants_grad(p: AttentionInputs) -> bool:
    given = (p.q, p.k, p.v, *p.weights.values())
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def run(p: AttentionInputs) -> Tensor:
    """Attention, pass by pass."""
    if p.q.numel() == 0 or p.k.shape[2] == 0:
        return p.q.new_zeros(*p.q.shape[:3], p.v.shape[-1])
    modify = _score_mod([_looked_up(term, p) for term in p.terms().values()], p.softcap)
    wide = torch.promote_types(p.v.dtype, torch.float32)
    out, lse = None, None
    for one in make_passes(p):
        more, more_lse = (x.to(wide) for x in _pass(p, one, modify))
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
    """a - b; a row that neither part sees has zeros to merge, so any weight does."""
    none = torch.isneginf(a) & torch.isneginf(b)
    return torch.where(none, torch.zeros_like(a), a - b)


def _pass(
    p: AttentionInputs, one: Pass, modify: Callable[..., Tensor] | None
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    q, k = one.turned()
    out, aux = _flex(p.q.is_cuda)(
        *(x.contiguous() for x in (q, k, p.v)),
        score_mod=modify,
        block_mask=block_mask(p, one.areas),
        scale=p.scale,
        enable_gqa=p.q.shape[1] != p.k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


def _looked_up(term: Term, p: AttentionInputs) -> Term:
    """A term of the distance alone as a look-up: cheap in every score, and its gradient is spread
    over all distances instead of adding up in a few weights, where a GPU's threads would queue."""
    if not isinstance(term, ByDistance) or term.cheap or not contiguous(p.q_pos, p.k_pos):
        return term
    table, last = term.table(p.q.shape[1], p.q_pos, p.k_pos), p.k.shape[2] - 1  # type: ignore[arg-type]
    return lambda b, h, i, j: table[h, i - j + last]


def _score_mod(
    terms: list[Callable[..., Tensor]], softcap: float | None
) -> Callable[..., Tensor] | None:
    if not terms and not softcap:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for term in terms:
            score = score + term(b, h, i, j).to(score.dtype)
        return softcap * torch.tanh(score / softcap) if softcap else score

    # flex counts a function's arguments, which a run-time type checker's wrapper would hide
    return lambda score, b, h, i, j: modify(score, b, h, i, j)


@lru_cache(maxsize=2)
def _flex(cuda: bool) -> Callable[..., Any]:
    """flex_attention, compiled on the GPU: whole, or with an error, but never silently
    uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    if not cuda:
        return flex_attention
    import torch._dynamo.config as config

    compiled = torch.compile(flex_attention, fullgraph=True)
    limits = {"recompile_limit": RECOMPILES, "accumulated_recompile_limit": 8 * RECOMPILES}

    def patient(*args: Any, **kwargs: Any) -> Any:
        with config.patch(limits):
            return compiled(*args, **kwargs)

    return patient
