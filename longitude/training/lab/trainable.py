"""Which schemes can be trained, and what becomes of a scheme when training is over.

The parts say so themselves (`core/part.py`): `training` lists what `--schemes all` trains with a
part, `at_test` what replaces it once the model is trained. Position policies draw ids during
training only. Remaps made for inference move distances that a model has learned already: they have
no `training`, and are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from longitude.core.part import PARTS, Dims, Site, as_tensor, optional
from longitude.core.scheme import Layers, Scheme, scheme_of
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown

Either = Scheme | Layers


def at_test(scheme: Either) -> Either:
    """The scheme for a model trained with this one: without what is for training alone."""
    if isinstance(scheme, Layers):
        return replace(scheme, schemes=tuple(map(at_test, scheme.schemes)))
    if scheme.rotary is None or not hasattr(scheme.rotary.remap, "at_test"):
        return scheme
    remap = optional(scheme.rotary.remap, "at_test")
    return replace(scheme, rotary=replace(scheme.rotary, remap=remap))


def check_trainable(scheme: Either, length: int, layers: int) -> None:
    """Raise unless a decoder with so many layers and tokens can be trained with the scheme."""
    for one in dict.fromkeys(scheme.layer(n, layers) for n in range(layers)):
        if one.rotary and one.rotary.remap and not hasattr(one.rotary.remap, "training"):
            raise UserError(
                f"{shown(one.rotary.remap)} is made for reading with a trained model, so it can't "
                f"be trained: train {shown(replace(one.rotary, remap=None))} and read with the "
                f"remap."
            )
        if not one.causal:
            raise UserError(
                f"{one} lets tokens see those ahead, which a decoder must predict: "
                f"leave bidirectional() out."
            )
        if any(getattr(b, "bidirectional", False) for b in one.bias):
            raise UserError(f"{one} is made for encoders: give its bias one direction.")
        _try_positions(one, length)


def _try_positions(scheme: Scheme, length: int) -> None:
    """Draw a batch's positions and pass them through every part that reads them, so that a table
    that is too short, or positions that a part can't take, fail here and not in the first step."""
    pos = as_tensor(scheme.positions.ids(length, rng=torch.Generator().manual_seed(0)))
    dims = Dims(8, 2, 4)
    if scheme.embed:
        x = torch.zeros(1, length, dims.dim)
        scheme.embed.embed(x, pos, scheme.embed.init(dims, None))
    for bias in scheme.bias:
        if pos.is_floating_point() and getattr(bias, "integer_positions", False):
            raise UserError(
                f"{scheme.positions} draws positions that are not whole, which {bias} has no entry "
                f"for: use it with rope(), sinusoidal() or alibi()."
            )


def every(length: int, layers: int) -> tuple[str, ...]:
    """One scheme for each encoding that can be trained on `length` tokens, site by site; and HWFA,
    which alternates layers."""
    order = get_args(Site)
    classes = sorted(PARTS.values(), key=lambda cls: order.index(cls.site))  # type: ignore[attr-defined]
    schemes = [scheme_of(choice) for cls in classes for choice in optional(cls, "training", length)]
    window = hwfa_window(length, layers)
    return (*map(dump, schemes), dump(parse(f"hwfa({length}, layers={layers}, window={window})")))


def hwfa_window(length: int, layers: int) -> int:
    """The window of HWFA's local layers: (w - 1)(layers - 1) + 1 = 3/4 of the length (Su 2023)."""
    return max(2, round((0.75 * length - 1) / max(1, layers - 1)) + 1)


def chosen(text: str, length: int, layers: int) -> tuple[Either, ...]:
    """The schemes of a `;`-separated list, or `all`; each parsed and found trainable."""
    names = every(length, layers) if text.strip() == "all" else text.split(";")
    schemes = tuple(dict.fromkeys(parse(name) for name in names if name.strip()))
    if not schemes:
        raise UserError('--schemes names none: give some, as in "rope(); alibi()", or all.')
    for scheme in schemes:
        check_trainable(scheme, length, layers)
    return schemes
