"""Cross-entropy without the table of all logits: by slices of the vocabulary, each computed again
in the backward pass.

    loss = Σ w_t (log Σ_v exp(h_t · W_v) - h_t · W_y(t)),  the sum over v by slices

as in Wijmans et al. 2024, "Cut Your Losses", arXiv:2411.09009, in plain torch. A slice keeps two
numbers a token, its log-sum-exp and the target's logit if it holds it; only one slice's logits are
alive at once.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
    h, y = hidden.flatten(0, -2), targets.flatten()
    found = [
        checkpoint(_slice, h, weight, bias, y, start, size, use_reentrant=False)
        for start in range(0, len(weight), size)
    ]
    total = torch.stack([lse for lse, _ in found]).logsumexp(0)
    told = torch.stack([logit for _, logit in found]).sum(0)
    return ((total - told) * weights.flatten()).sum()


def plain_loss(
    logits: Float[Tensor, "*b n vocabulary"],
    targets: Int[Tensor, "*b n"],
    weights: Float[Tensor, "*b n"],
) -> Float[Tensor, ""]:
    """The same from all logits, for models that do more to them than a matrix does."""
    wide = _wide(logits.flatten(0, -2))
    each = torch.nn.functional.cross_entropy(wide, targets.flatten(), reduction="none")
    return (each * weights.flatten()).sum()


def _slice(
    h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, start: int, size: int
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp over a slice of the vocabulary, and the target's logit or 0."""
    some = slice(start, start + size)
    logits = torch.nn.functional.linear(h, weight[some], None if bias is None else bias[some])
    wide = _wide(logits)
    here = (y >= start) & (y < start + wide.shape[1])
    told = wide.gather(1, torch.where(here, y - start, 0)[:, None])[:, 0]
    return wide.logsumexp(1), torch.where(here, told, 0.0)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: sums over a vocabulary lose too much in fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
