"""Cross-entropy without the table of all logits: by slices of the vocabulary, each computed again
in the backward pass.

    loss = Σ w_t (log Σ_v exp(h_t · W_v) - h_t · W_y(t)),  the sum over v by slices
    d loss / d logit_tv = w_t (exp(logit_tv - log Σ_v …) - [v = y(t)])

as in Wijmans et al. 2024, "Cut Your Losses", arXiv:2411.09009. Between the passes two numbers a
token are kept, and only one slice's logits are alive at once. Both formulas run over a slice's
logits in one reading on a GPU (attention/triton/logits.py); beside them stands plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from longitude.ops.kernels.launch import usable

SLICE = 8192  # tokens of the vocabulary that are scored at once


def chunked_loss(
    hidden: Float[Tensor, "*b n dim"],
    weight: Float[Tensor, "vocabulary dim"],
    targets: Int[Tensor, "*b n"],
    weights: Float[Tensor, "*b n"],
    bias: Float[Tensor, " vocabulary"] | None = None,
    size: int = SLICE,
) -> Float[Tensor, ""]:
    """The sum of each target's weighted loss."""
    device = hidden.device.type
    within = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    given = (hidden.flatten(0, -2), weight, bias, targets.flatten(), weights.flatten())
    return _BySlices.apply(*given, size, within or hidden.dtype)  # type: ignore[no-any-return]


def plain_loss(
    logits: Float[Tensor, "*b n vocabulary"],
    targets: Int[Tensor, "*b n"],
    weights: Float[Tensor, "*b n"],
) -> Float[Tensor, ""]:
    """The same from all logits, for models that do more to them than a matrix does."""
    each = cross_entropy(_wide(logits.flatten(0, -2)), targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum()


class _BySlices(torch.autograd.Function):
    """apply(hidden, weight, bias, targets, weights, size, dtype of the products)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor,
                weights: Tensor, size: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
        sums = torch.full(y.shape, -torch.inf, dtype=_wide(h).dtype, device=h.device)
        told = torch.zeros_like(sums)
        with torch.autocast(h.device.type, enabled=False):
            for start, logits in _slices(h, weight, bias, size, dtype):
                sums, told = gather(logits, y - start, sums, told)
        ctx.save_for_backward(h, weight, bias, y, weights, sums)
        ctx.size, ctx.dtype = size, dtype
        return ((sums - told) * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        h, weight, bias, y, weights, sums = ctx.saved_tensors
        by = (weights * grads[0]).to(sums.dtype)
        seen = h.to(ctx.dtype)
        d_h = torch.zeros_like(h, dtype=sums.dtype)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else torch.empty_like(bias)
        for start, logits in _slices(h, weight, bias, ctx.size, ctx.dtype):
            some = slice(start, start + logits.shape[1])
            slope = slopes(logits, y - start, sums, by)
            d_h += slope @ weight[some].to(ctx.dtype)
            if d_weight is not None:
                d_weight[some] = slope.mT @ seen
            if d_bias is not None:
                d_bias[some] = slope.sum(0)
        return d_h.to(h.dtype), d_weight, d_bias, None, None, None, None


def _slices(
    h: Tensor, weight: Tensor, bias: Tensor | None, size: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """The logits of each slice, and where it starts."""
    h = h.to(dtype)
    for start in range(0, len(weight), size):
        some = slice(start, start + size)
        own = None if bias is None else bias[some].to(dtype)
        yield start, linear(h, weight[some].to(dtype), own)


def gather(
    logits: Float[Tensor, "n size"],
    y: Int[Tensor, " n"],
    sums: Float[Tensor, " n"],
    told: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The log-sum-exp with a slice added to it, and the targets' logits with those that it holds
    (`y` counts from its first column)."""
    if usable(logits) and sums.dtype == torch.float32:
        from longitude.ops.kernels import loss as kernels  # late: it imports Triton

        return kernels.gather(logits, y, sums, told)
    wide, here = _wide(logits), (y >= 0) & (y < logits.shape[1])
    found = wide.gather(1, torch.where(here, y, 0)[:, None])[:, 0]
    return torch.logaddexp(sums, wide.logsumexp(1)), torch.where(here, found, told)


def slopes(
    logits: Float[Tensor, "n size"],
    y: Int[Tensor, " n"],
    sums: Float[Tensor, " n"],
    by: Float[Tensor, " n"],
) -> Float[Tensor, "n size"]:
    """The gradient of a slice's logits, maybe written over them."""
    if usable(logits) and sums.dtype == torch.float32:
        from longitude.ops.kernels import loss as kernels  # late: it imports Triton

        return kernels.slopes(logits, y, sums, by)
    share = (_wide(logits) - sums[:, None]).exp_()
    row = torch.nonzero((y >= 0) & (y < logits.shape[1]))[:, 0]
    share[row, y[row]] -= 1
    return share.mul_(by[:, None]).to(logits.dtype)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: sums over a vocabulary lose too much in fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
