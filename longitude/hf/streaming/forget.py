"""What it takes to read without end: a scheme under which every token is out of sight some day.

Xiao et al. 2023 (StreamingLLM) keep the first `sinks` tokens and the last `window`, and number them
by their place in the cache, so that sinks + window is the largest distance a model ever meets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longitude.fields import Mistake, shown
from longitude.hf.patch import trained_length
from longitude.hf.patching.trunk import trunks
from longitude.scheme import Layers, Scheme

LATER = 2**40  # a position that no text comes to


def check(sinks: int, window: int) -> None:
    """Raise where these can't be, whatever the model."""
    if sinks < 0:
        raise Mistake(f"sinks are 0 or more first tokens, but got {shown(sinks)}: use 4.")
    if window < 1:
        raise Mistake(f"a window is 1 token or more, but got {shown(window)}: use 1020.")


def check_model(model: Any, wide: int | None) -> None:
    """Raise where a model can't stream, or not with so many positions."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise Mistake(
            f"a stream is one text that goes on, but {name} reads one and writes another: use a "
            f"decoder."
        )
    if not trunks(model):
        raise Mistake(
            f"a stream gives tokens new positions as others leave, which takes rotary ones, and "
            f"{name} has none: use a RoPE model."
        )
    trained = trained_length(model)
    if wide is not None and trained is not None and wide > trained:
        raise Mistake(
            f"sinks and window are {wide} positions, but the checkpoint was trained to {trained}: "
            f"let them be {trained} together at most."
        )


def forgetting(sinks: int, window: int) -> str:
    """StreamingLLM's scheme. The mask says once more what the remap shows, for layers that have no
    rotation to remap."""
    if not sinks:
        return f"rope() + window({window})"
    return f"rope(remap=streaming({sinks}, {window})) + window({window}, {sinks})"


def check_forgets(scheme: Scheme | Layers) -> None:
    """Raise unless every layer reads forwards and forgets."""
    for one in (scheme.layer(i) for i in range(len(scheme))):
        if not one.causal:
            raise Mistake(f"a stream reads forwards, but {shown(one)} sees ahead: use a decoder.")
        if not forgets(one):
            raise Mistake(
                f"{shown(one)} keeps every token in sight, so its memory would grow without end: "
                f"add window(…), or leave the scheme out."
            )


def forgets(scheme: Scheme | Layers) -> bool:
    """Whether in every layer a token is out of sight some day, but for the first ones."""
    now, key = torch.tensor([[LATER]]), torch.tensor([[LATER // 2]])
    layers = [scheme.layer(i) for i in range(len(scheme))]
    return not any(bool(area.ever(now, key)) for one in layers for area in one.areas())


def bytes_held(layer: Any) -> int:
    """What a layer of a cache holds: ours, or states of the model's own."""
    store = getattr(layer, "store", None)
    return _held(vars(layer)) if store is None else store.nbytes


def _held(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(map(_held, value))
    return value.nbytes if isinstance(value, Tensor) else 0
