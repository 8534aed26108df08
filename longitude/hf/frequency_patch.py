"""Other frequencies in place: a rotary embedding's `inv_freq` and `attention_scaling` exchanged.

What a scheme of other frequencies needs and nothing more: transformers' own attention and caches
stay, and so does its speed. The numbers are made in float32 in transformers' order of operations,
so the same frequencies are the same bits.
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


def only_frequencies(seen: list[ProbedLayer], wanted: list[Scheme]) -> bool:
    """Whether these schemes differ from the model's own in frequencies alone, and those fixed."""
    kinds: dict[tuple[int, str | None], Rope] = {}
    for one, scheme in zip(seen, wanted, strict=True):
        own = one.scheme
        if dataclasses.replace(scheme, rotary=own.rotary) != own:
            return False
        if own.rotary is None or scheme.rotary is None:
            continue
        rope = scheme.rotary
        same = dataclasses.replace(rope, base=own.rotary.base, frequencies=own.rotary.frequencies)
        lasting = [not f.by_length for f in (rope.frequencies, own.rotary.frequencies)]
        if same != own.rotary or not all(lasting) or by_rows(rope.frequencies):
            return False
        if kinds.setdefault((id(one.trunk), one.kind), rope) != rope:
            return False  # layers that share an embedding would need two
    return all(len(one.trunk.rotaries) == 1 for one in seen)


@contextmanager
def frequencies_replaced(seen: list[ProbedLayer], wanted: list[Scheme]) -> Iterator[None]:
    """The model with these frequencies."""
    with ExitStack() as stack:
        done = set()
        for one, scheme in zip(seen, wanted, strict=True):
            key = (id(one.trunk), one.kind)
            if scheme.rotary is not None and key not in done:
                done.add(key)
                stack.enter_context(_swapped(one.trunk.rotaries[0], one.kind, scheme.rotary))
        yield


@contextmanager
def _swapped(rotary: nn.Module, kind: str | None, rope: Rope) -> Iterator[None]:
    prefix = f"{kind}_" if kind is not None and hasattr(rotary, f"{kind}_inv_freq") else ""
    name, scaling = f"{prefix}inv_freq", f"{prefix}attention_scaling"
    before: torch.Tensor = getattr(rotary, name)
    size: Any = getattr(rotary, scaling, None)
    made = rope.frequencies.inv_freq(2 * before.numel(), rope.base, 1, dtype=torch.float32)
    try:
        rotary._buffers[name] = made.to(before.device)
        if size is not None:
            setattr(rotary, scaling, attention_scaling(rope.frequencies, 1))
        yield
    finally:
        rotary._buffers[name] = before
        if size is not None:
            setattr(rotary, scaling, size)
