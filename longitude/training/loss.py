"""The loss of a causal language model on a batch, without materialising all logits.

Cross-entropy over slices of the vocabulary, each recomputed in the backward pass:

    loss = Σ w_t (log Σ_v exp(h_t · W_v) - h_t · W_y(t)),  the sum over v by slices
    d loss / d logit_tv = w_t (exp(logit_tv - log Σ_v …) - [v = y(t)])

as in Wijmans et al. 2024, "Cut Your Losses", arXiv:2411.09009. Besides its inputs, the forward pass
saves only one log-sum-exp per token, and the logits of one slice exist at a time. On a GPU each
formula is one kernel over a slice (ops/kernels/loss.py); the reference here is plain torch.

How a model computes logits from hidden states, and whether it separates packed documents, is
determined by running it on a few tokens instead of from a list of architectures.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from longitude.hf.patch import apply
from longitude.hf.ranks import ranks_of
from longitude.ops.kernels.launch import usable
from longitude.ops.shards import shard

SLICE = 8192  # vocabulary entries whose logits are computed at once
PROBE = 6  # tokens of a document that a model is probed with
Each = Float[Tensor, " n"]  # one number for each token


def chunked_loss(
    hidden: Float[Tensor, "*b n dim"],
    weight: Float[Tensor, "vocabulary dim"],
    targets: Int[Tensor, "*b n"],
    weights: Float[Tensor, "*b n"],
    bias: Float[Tensor, " vocabulary"] | None = None,
    size: int = SLICE,
) -> Float[Tensor, ""]:
    """Return the weighted sum of the targets' losses, over slices of `size` vocabulary entries."""
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    inputs = (hidden.flatten(0, -2), weight, bias, targets.flatten(), weights.flatten())
    return _SlicedCrossEntropy.apply(*inputs, size, autocast or hidden.dtype)  # type: ignore[no-any-return]


def plain_loss(
    logits: Float[Tensor, "*b n vocabulary"],
    targets: Int[Tensor, "*b n"],
    weights: Float[Tensor, "*b n"],
) -> Float[Tensor, ""]:
    """Return the same from all logits, for models whose head is more than a matrix."""
    losses = cross_entropy(_promoted(logits.flatten(0, -2)), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


class _SlicedCrossEntropy(torch.autograd.Function):
    """apply(hidden, weight, bias, targets, weights, size, dtype of the products)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor,
                weights: Tensor, size: int, dtype: torch.dtype) -> Tensor:  # fmt: skip
        lse = torch.full(y.shape, -torch.inf, dtype=_promoted(h).dtype, device=h.device)
        target_logits = torch.zeros_like(lse)
        with torch.autocast(h.device.type, enabled=False):
            for start, logits in _slices(h, weight, bias, size, dtype):
                lse, target_logits = gather(logits, y - start, lse, target_logits)
        ctx.save_for_backward(h, weight, bias, y, weights, lse)
        ctx.size, ctx.dtype = size, dtype
        return ((lse - target_logits) * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        h, weight, bias, y, weights, lse = ctx.saved_tensors
        scale = (weights * grads[0]).to(lse.dtype)
        hidden = h.to(ctx.dtype)
        d_h = torch.zeros_like(h, dtype=lse.dtype)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else torch.empty_like(bias)
        for start, logits in _slices(h, weight, bias, ctx.size, ctx.dtype):
            entries = slice(start, start + logits.shape[1])
            d_logits = slopes(logits, y - start, lse, scale)
            d_h += d_logits @ weight[entries].to(ctx.dtype)
            if d_weight is not None:
                d_weight[entries] = d_logits.mT @ hidden
            if d_bias is not None:
                d_bias[entries] = d_logits.sum(0)
        return d_h.to(h.dtype), d_weight, d_bias, None, None, None, None


def _slices(
    h: Tensor, weight: Tensor, bias: Tensor | None, size: int, dtype: torch.dtype
) -> Iterator[tuple[int, Tensor]]:
    """Yield the start of each vocabulary slice, and its logits."""
    h = h.to(dtype)
    for start in range(0, len(weight), size):
        entries = slice(start, start + size)
        slice_bias = None if bias is None else bias[entries].to(dtype)
        yield start, linear(h, weight[entries].to(dtype), slice_bias)


def gather(
    logits: Float[Tensor, "n size"], y: Int[Tensor, " n"], lse: Each, target_logits: Each
) -> tuple[Each, Each]:
    """Add a slice to the log-sum-exp, and fill in the logits of the targets that are in the slice
    (`y` is relative to its first column)."""
    if usable(logits) and lse.dtype == torch.float32:
        from longitude.ops.kernels import loss as kernels  # late import: it needs Triton

        return kernels.gather(logits, y, lse, target_logits)
    promoted, inside = _promoted(logits), (y >= 0) & (y < logits.shape[1])
    picked = promoted.gather(1, torch.where(inside, y, 0)[:, None])[:, 0]
    return torch.logaddexp(lse, promoted.logsumexp(1)), torch.where(inside, picked, target_logits)


def slopes(
    logits: Float[Tensor, "n size"], y: Int[Tensor, " n"], lse: Each, scale: Each
) -> Float[Tensor, "n size"]:
    """Return the gradient of a slice's logits; the kernel overwrites the logits with it."""
    if usable(logits) and lse.dtype == torch.float32:
        from longitude.ops.kernels import loss as kernels  # late import: it needs Triton

        return kernels.slopes(logits, y, lse, scale)
    gradient = (_promoted(logits) - lse[:, None]).exp_()
    rows = torch.nonzero((y >= 0) & (y < logits.shape[1]))[:, 0]
    gradient[rows, y[rows]] -= 1
    return gradient.mul_(scale[:, None]).to(logits.dtype)


def _promoted(x: Tensor) -> Tensor:
    """Convert to float32 at least: sums over a vocabulary lose too much in fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LossModel(nn.Module):
    """The summed, weighted loss of a causal language model on a batch. It is one module, so that
    FSDP gathers the head's weights for the loss as well. With `drawn` positions, a jump does not
    start another document. Over a group (`spread`), each rank has the loss of its own tokens."""

    def __init__(self, model: Any, drawn: bool = False) -> None:
        super().__init__()
        self.model, self.drawn, self.group = model, drawn, None
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.plain_head = self._has_plain_head()

    def forward(
        self,
        tokens: Int[Tensor, "rows n"],
        pos: Int[Tensor, "rows n"],
        targets: Int[Tensor, "rows n"],
        weights: Float[Tensor, "rows n"],
    ) -> Float[Tensor, ""]:
        if self.group is not None:
            starts = torch.zeros_like(tokens)
            if not self.drawn:  # a position that does not increase starts another document
                starts[:, 1:] = pos.diff(dim=1) <= 0
            tokens, pos, targets, weights, documents = (
                shard(x, self.group, order="zigzag")
                for x in (tokens, pos, targets, weights, starts.cumsum(1))
            )
            ranks = ranks_of(self.model)
            assert ranks is not None, "`spread` has patched the model"
            ranks.segments = documents if bool(documents.any()) else None
        inputs = self._inputs(tokens, pos)
        if not self.plain_head:
            return plain_loss(self.model(**inputs).logits, targets, weights)
        hidden = self.model.base_model(**inputs)[0]
        head = self.model.get_output_embeddings()
        return chunked_loss(hidden, head.weight, targets, weights, getattr(head, "bias", None))

    def spread(self, group: Any, scheme: str, split: str = "tokens") -> None:
        """Run the model over the ranks of a group from now on. Each rank has its own tokens;
        attention sends keys around a ring (`tokens`) or exchanges tokens for heads (`heads`)."""
        apply(self.model, scheme, group=group)
        ranks = ranks_of(self.model)
        assert ranks is not None, "it is patched over them"
        self.group, ranks.split = group, split

    def _inputs(self, tokens: Tensor, pos: Tensor) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if self.takes_positions:
            inputs["position_ids"] = pos
        if self.drawn:  # without a mask, transformers treats each jump as another document
            inputs["attention_mask"] = torch.ones_like(tokens)
        return inputs

    @torch.no_grad()
    def separates_documents(self) -> bool:
        """Whether a document gets the same logits after another one in a packed row as alone."""
        if self.drawn or not self.takes_positions:
            return False
        ids = self._probe_tokens(2 * PROBE)
        pos = torch.arange(PROBE, device=ids.device).repeat(2)[None]
        packed = self.model(**self._inputs(ids, pos)).logits[:, PROBE:]
        alone = self.model(**self._inputs(ids[:, PROBE:], pos[:, PROBE:])).logits
        return torch.allclose(packed, alone, rtol=1e-2, atol=1e-2 * float(alone.abs().max()))

    @torch.no_grad()
    def _has_plain_head(self) -> bool:
        """Whether the logits are the hidden states times the head's matrix (and bias), no more."""
        head, ids = self.model.get_output_embeddings(), self._probe_tokens(PROBE)
        if not isinstance(getattr(head, "weight", None), Tensor):
            return False
        hidden = self.model.base_model(ids, use_cache=False)[0]
        logits = self.model(ids, use_cache=False).logits
        if hidden.shape[-1] != head.weight.shape[1]:
            return False
        plain = linear(hidden, head.weight, getattr(head, "bias", None))
        return torch.allclose(plain, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max()))

    def _probe_tokens(self, count: int) -> Tensor:
        weight = self.model.get_input_embeddings().weight
        return (torch.arange(count, device=weight.device) * 7 + 3)[None] % len(weight)
