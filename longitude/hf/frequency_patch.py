"""A patch of frequencies alone: a rotary embedding's `inv_freq` and `attention_scaling` replaced.

transformers' own attention and caches stay, and so does their speed. The frequencies are computed
in float32 in transformers' order of operations, so equal frequencies are equal bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from longitude.core.part import by_rows
from longitude.core.scheme import Scheme
from longitude.hf.probe import ProbedLayer
from longitude.parts import Rope
from longitude.parts.rotary_tables import attention_scaling


def only_frequencies(layers: list[ProbedLayer], wanted: list[Scheme]) -> bool:
    """Whether schemes differ from the model's own in frequencies alone, which no length changes."""
    by_type: dict[tuple[int, str | None], Rope] = {}
    for layer, scheme in zip(layers, wanted, strict=True):
        own, rope, before = layer.scheme, scheme.rotary, layer.scheme.rotary
        if dataclasses.replace(scheme, rotary=before) != own or (rope is None) != (before is None):
            return False
        if rope is None or before is None:
            continue
        same = dataclasses.replace(rope, base=before.base, frequencies=before.frequencies)
        by_length = rope.frequencies.by_length or before.frequencies.by_length
        if same != before or by_length or by_rows(rope.frequencies):
            return False
        if by_type.setdefault((id(layer.owner), layer.rope_type), rope) != rope:
            return False  # layers that share a rotary embedding would need two
    return all(len(layer.owner.rotaries) == 1 for layer in layers)


@contextmanager
def frequencies_replaced(layers: list[ProbedLayer], wanted: list[Scheme]) -> Iterator[None]:
    """The model with these schemes' frequencies."""
    with ExitStack() as stack:
        done = set()
        for layer, scheme in zip(layers, wanted, strict=True):
            key = (id(layer.owner), layer.rope_type)
            if scheme.rotary is not None and key not in done:
                done.add(key)
                rotary = layer.owner.rotaries[0]
                stack.enter_context(_replaced(rotary, layer.rope_type, scheme.rotary))
        yield


@contextmanager
def _replaced(rotary: nn.Module, rope_type: str | None, rope: Rope) -> Iterator[None]:
    prefix = f"{rope_type}_" if hasattr(rotary, f"{rope_type}_inv_freq") else ""
    name, scaling = f"{prefix}inv_freq", f"{prefix}attention_scaling"
    before: torch.Tensor = getattr(rotary, name)
    factor: Any = getattr(rotary, scaling, None)
    new = rope.frequencies.inv_freq(2 * before.numel(), rope.base, 1, dtype=torch.float32)
    try:
        rotary._buffers[name] = new.to(before.device)
        if factor is not None:
            setattr(rotary, scaling, attention_scaling(rope.frequencies, 1))
        yield
    finally:
        rotary._buffers[name] = before
        if factor is not None:
            setattr(rotary, scaling, factor)
