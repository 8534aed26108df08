"""A model as training sees it: tokens and positions in, the weighted loss of a batch out.

It is one module, so that whoever shards it gathers the head's weights for the loss as well. What a
model does with its hidden states, and whether it keeps packed documents apart, is asked of the
model itself, on a few tokens, and not of a list of architectures.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.training.loss import chunked_loss, plain_loss

FEW = 6  # tokens of a document that is tried


class Reader(nn.Module):
    """The loss of a causal language model on a batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.placed = "position_ids" in takes
        self.plain_head = _plain_head(model)

    def forward(
        self,
        tokens: Int[Tensor, "rows n"],
        pos: Int[Tensor, "rows n"],
        targets: Int[Tensor, "rows n"],
        weights: Float[Tensor, "rows n"],
        drawn: bool = False,
    ) -> Float[Tensor, ""]:
        """The sum of each target's weighted loss; `drawn` positions say nothing of documents."""
        given = self._given(tokens, pos, drawn)
        if not self.plain_head:
            return plain_loss(self.model(**given).logits, targets, weights)
        hidden = self.model.base_model(**given)[0]
        head = self.model.get_output_embeddings()
        return chunked_loss(hidden, head.weight, targets, weights, getattr(head, "bias", None))

    def _given(self, tokens: Tensor, pos: Tensor, drawn: bool) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if self.placed:
            given["position_ids"] = pos
        if drawn:  # without a mask, transformers would take every skip for another document
            given["attention_mask"] = torch.ones_like(tokens)
        return given

    @torch.no_grad()
    def packs(self) -> bool:
        """Whether two documents in a row are read as each alone."""
        if not self.placed:
            return False
        ids = _some_tokens(self.model, 2 * FEW)
        pos = torch.arange(FEW, device=ids.device).repeat(2)[None]
        both = self.model(**self._given(ids, pos, False)).logits[:, FEW:]
        alone = self.model(**self._given(ids[:, FEW:], pos[:, FEW:], False)).logits
        return torch.allclose(both, alone, rtol=1e-2, atol=1e-2 * float(alone.abs().max()))


@torch.no_grad()
def _plain_head(model: Any) -> bool:
    """Whether logits are the hidden states times the head's matrix, and nothing more."""
    head, ids = model.get_output_embeddings(), _some_tokens(model, FEW)
    if not isinstance(getattr(head, "weight", None), Tensor):
        return False
    hidden, wanted = model.base_model(ids, use_cache=False)[0], model(ids, use_cache=False).logits
    if hidden.shape[-1] != head.weight.shape[1]:
        return False
    told = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None))
    return torch.allclose(told, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def _some_tokens(model: Any, count: int) -> Tensor:
    """Different tokens of the vocabulary, on the model's device."""
    weight = model.get_input_embeddings().weight
    return (torch.arange(count, device=weight.device) * 7 + 3)[None] % len(weight)
