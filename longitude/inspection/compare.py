"""Every preset under one trained length and one target, for the comparison of their properties.

What a preset's parameters are called says what they are for: the trained length, the factor to the
target, a window. Those that are called otherwise keep their defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.validate import UserError
from longitude.inspection.properties import check
from longitude.inspection.rows import Checked
from longitude.presets import PRESETS

LENGTH, TRAINED = 4096, 1024
LAYERS = 4
# whose factor is no ratio of lengths: the length of the call says how far, or a rule of the paper
OWN_FACTOR = ("dynamic_ntk_llama", "su_leaky_rerope")


def compare(
    *, length: int = LENGTH, trained: int = TRAINED, dim: int = 64, heads: int = 8
) -> Iterator[Checked]:
    """The properties of each preset in turn, in the order of the table of presets."""
    if not 2 <= trained <= length:
        raise UserError(
            f"schemes are compared from a trained length to a longer one, but got {trained} and "
            f"{length}: give --trained below --length."
        )
    for name, make in PRESETS.items():
        scheme = made(make, length, trained, dim)
        try:
            found = check(scheme, dim=dim, heads=heads, length=length, trained=trained)
            yield replace(found, name=name)
        except UserError as mistake:
            yield Checked(str(scheme), length, dim, heads, (), name, str(mistake))


def made(
    make: Callable[..., Scheme | Layers], length: int, trained: int, dim: int
) -> Scheme | Layers:
    """A preset with its parameters for these lengths."""
    factor = length / trained
    for_these: dict[str, Any] = {
        "train": trained,
        "original": trained,
        "length": trained,
        "mean": trained,
        "chunk": trained,
        "target": length,
        "max": 4 * length,
        "factor": factor,
        "window": max(2, trained // 4),
        "layers": LAYERS,
        "short": (1.0,) * (dim // 2),
        "long": (factor,) * (dim // 2),
    }
    names = inspect.signature(make).parameters
    given = {name: for_these[name] for name in names if name in for_these}
    if make.__name__ in OWN_FACTOR:
        del given["factor"]
    return make(**given)
