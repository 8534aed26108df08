"""What is trained: everything, or LoRA's matrices beside the weights, with embeddings and norms.

Hu et al. 2021, "LoRA", arXiv:2106.09685: W + (α/r)·B·A, B zero at first. Chen et al. 2023
(LongLoRA) found that for longer contexts embeddings and norms must learn as well. peft makes and
stores adapters; it is imported when one is asked for. What is trained is held in float32, whatever
the rest is held in: an update is often smaller than half a bfloat16 step.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from longitude.core.validate import UserError
from longitude.training.tune.recipes import LORA

ALPHA = 2  # times the rank


def check_possible(trained: str) -> None:
    """Raise where what is asked for can't be trained here."""
    if trained == LORA and find_spec("peft") is None:
        raise UserError(
            "LoRA needs the package peft: pip install longitude[tune], or train --full."
        )


def make_trainable(model: Any, trained: str, rank: int) -> Any:
    """The model ready for training, its adapter in place; and what peft calls it, which stores the
    adapter (the model itself where there is none)."""
    whole = _adapted(model, rank) if trained == LORA else model
    if trained != LORA:
        model.requires_grad_(True)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(torch.float32)
    return whole


def _adapted(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=ALPHA * rank,
        target_modules="all-linear",
        modules_to_save=saved_whole(model),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        ensure_weight_tying=bool(getattr(model.config, "tie_word_embeddings", False)),
    )
    return get_peft_model(model, config)


def saved_whole(model: Any) -> list[str]:
    """The last names of embeddings and norms."""
    embeddings = [m for m in (model.get_input_embeddings(),) if m is not None]
    return list(
        dict.fromkeys(
            path.rpartition(".")[2]
            for path, module in model.named_modules()
            if any(module is e for e in embeddings) or _norm(module)
        )
    )


def _norm(module: nn.Module) -> bool:
    own = any(True for _ in module.parameters(recurse=False))
    return own and "norm" in type(module).__name__.lower()


class Trained(nn.Module):
    """A model's parameters that learn, by name, as a state on disk wants to see them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = (model,)  # in a tuple: it is no part of this module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that learn."""
        return ((name, p) for name, p in self._held[0].named_parameters() if p.requires_grad)

    def names(self) -> list[str]:
        """Their names."""
        return [name for name, _ in self.named_parameters()]

    def counts(self) -> dict[str, int]:
        """How many numbers learn, and how many there are."""
        held = self._held[0]
        learn = sum(p.numel() for _, p in self.named_parameters())
        return {"trained": learn, "all": sum(p.numel() for p in held.parameters())}
