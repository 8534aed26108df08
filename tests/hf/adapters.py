"""Tiny adapters, as peft makes them, with matrices that change something."""

from __future__ import annotations

from typing import Any

import torch


def with_lora(model: Any, *, saved: tuple[str, ...] = ("norm",), seed: int = 0) -> Any:
    """A model under LoRA whose trained weights are drawn, not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=list(saved))
    made = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.1 * noise.to(parameter.dtype))
    return made
