"""Layers that are computed again in the backward pass, under a patch.

Gradient checkpointing (Chen et al. 2016, arXiv:1604.06174) keeps a layer's input and runs it once
more when its gradient is due. A patched layer reads its positions off its trunk, which forgets them
when the forward ends; so each checkpoint takes what the trunk knew, and puts it back for as long as
the layer runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from longitude.hf.layer import LAYER_STATE, LayerState
from longitude.hf.model_state import ModelState

KNOWN = ("pos", "past", "pieces", "length", "hidden")  # of a forward under way


def seats(model: nn.Module) -> list[LayerState]:
    """Where a patched model attends by our own attention; none where only frequencies changed."""
    found = [getattr(module, LAYER_STATE, None) for module in model.modules()]
    return [seat for seat in found if isinstance(seat, LayerState) and seat.active]


def trunks(model: nn.Module) -> list[ModelState]:
    """What those seats read their positions from."""
    return list(dict.fromkeys(seat.trunk for seat in seats(model)))


@contextmanager
def knowing(trunk: ModelState, **known: Any) -> Iterator[None]:
    """A trunk that knows something else, for as long as the context lasts."""
    before = {name: getattr(trunk, name) for name in known}
    for name, value in known.items():
        setattr(trunk, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trunk, name, value)


def checkpointed(model: Any) -> None:
    """Have every layer run again in the backward pass instead of keeping what it made."""
    found = trunks(model)  # once: a walk over all modules for each layer would take its time
    kinds = {"use_reentrant": False, "context_fn": lambda: _contexts(found)}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kinds)


def _contexts(
    found: list[ModelState],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the first run nothing; for the second, what the trunks know now."""
    known = [(trunk, {name: getattr(trunk, name) for name in KNOWN}) for trunk in found]
    return nullcontext(), _remembering(known)


@contextmanager
def _remembering(known: list[tuple[ModelState, dict[str, Any]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for trunk, each in known:
            stack.enter_context(knowing(trunk, **each))
        yield
