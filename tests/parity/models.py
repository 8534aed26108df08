"""Tiny random models of transformers, and what went into and came out of one of their modules."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """One call of a watched module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def hidden(self) -> Tensor:
        """The hidden states it was given."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    @property
    def out(self) -> Tensor:
        """What it made of them."""
        return self.result[0] if isinstance(self.result, tuple) else self.result


@contextmanager
def watched(module: nn.Module) -> Iterator[list[Call]]:
    """The calls of a module while a whole model runs around it, with its own masks and tables."""
    calls: list[Call] = []

    def remember(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.append(Call(args, kwargs, result))

    handle = module.register_forward_hook(remember, with_kwargs=True)
    try:
        with torch.no_grad():
            yield calls
    finally:
        handle.remove()


def ready(model: nn.Module) -> Any:
    """The model with weights large enough for attention to be far from uniform, in eval mode."""
    with torch.no_grad():
        for weight in filter(lambda w: w.requires_grad, model.parameters()):  # not sinusoids
            noise = torch.randn_like(weight)
            if weight.dim() > 1:
                weight.copy_(noise * 1.3 * weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.2 * noise)
    return model.eval()


def split(x: Tensor, heads: int) -> Tensor:
    """(b n heads·d) as (b heads n d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(b heads n d) as (b n heads·d)."""
    return x.transpose(1, 2).flatten(2)
