"""Gradient checkpointing of a patched model.

Chen et al. 2016, arXiv:1604.06174: keep a layer's input only and run the layer again in the
backward pass. A patched layer reads its positions from its model's `ForwardState`, which ends with the
forward; so each checkpoint keeps that state and restores it while the layer runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from longitude.hf.layer import LAYER_STATE, LayerState
from longitude.hf.model_state import ForwardState, ModelState


def layer_states(model: nn.Module) -> list[LayerState]:
    """The layers that run our own attention; none where only frequencies changed."""
    found = [getattr(module, LAYER_STATE, None) for module in model.modules()]
    return [layer for layer in found if isinstance(layer, LayerState) and layer.active]


@contextmanager
def forward_state(state: ModelState, forward: ForwardState) -> Iterator[None]:
    """A model's forward state replaced, and restored on exit."""
    before, state.forward = state.forward, forward
    try:
        yield
    finally:
        state.forward = before


def checkpointed(model: Any) -> None:
    """Run every layer again in the backward pass instead of keeping its activations."""
    # once: a walk over all modules for each layer would take its time
    states = list(dict.fromkeys(layer.model for layer in layer_states(model)))
    kinds = {"use_reentrant": False, "context_fn": lambda: _contexts(states)}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)


def _contexts(
    states: list[ModelState],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the first run nothing; for the second, the forward states of the first."""
    return nullcontext(), _restored([(state, state.forward) for state in states])


@contextmanager
def _restored(forwards: list[tuple[ModelState, ForwardState]]) -> Iterator[None]:
    with ExitStack() as stack:
        for state, forward in forwards:
            stack.enter_context(forward_state(state, forward))
        yield
