"""Which schemes can be trained, and what becomes of a scheme when training is over.

Some parts are for training alone: positions that are drawn (randomized, equal-mean, PoSE) and
inverse leaky ReRoPE, whose model reads with plain RoPE. Remaps made for inference move distances
that a model has learned already, so there is nothing in them to train.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from longitude.fields import Mistake, shown
from longitude.part import Dims, as_tensor
from longitude.parts import T5, Deberta, InverseLeaky, Shaw, TransformerXl
from longitude.scheme import Layers, Scheme

Either = Scheme | Layers
WHOLE = (T5, Shaw, Deberta, TransformerXl)  # biases with a weight for each whole distance


def schemes_of(scheme: Either) -> tuple[Scheme, ...]:
    """The different schemes of a model's layers."""
    return tuple(dict.fromkeys(scheme.schemes)) if isinstance(scheme, Layers) else (scheme,)


def at_test(scheme: Either) -> Either:
    """The scheme that reads what this one trained: without what is for training alone."""
    if isinstance(scheme, Layers):
        return Layers(tuple(_at_test(s) for s in scheme.schemes))
    return _at_test(scheme)


def _at_test(scheme: Scheme) -> Scheme:
    if scheme.rotary and isinstance(scheme.rotary.remap, InverseLeaky):
        return replace(scheme, rotary=replace(scheme.rotary, remap=None))
    return scheme


def check_trainable(scheme: Either, length: int, layers: int) -> None:
    """Raise unless a decoder with so many layers and tokens can be trained with the scheme."""
    for index in range(len(scheme)):
        _check(scheme.layer(index, layers), length)


def _check(scheme: Scheme, length: int) -> None:
    remap = scheme.rotary.remap if scheme.rotary else None
    if remap is not None and not isinstance(remap, InverseLeaky):
        raise Mistake(
            f"{shown(remap)} is made for reading with a trained model, so it can't be trained: "
            f"train {shown(replace(scheme.rotary, remap=None))} and read with the remap."  # type: ignore[type-var]
        )
    if not scheme.causal:
        raise Mistake(
            f"{scheme} lets tokens see those ahead, which a decoder must predict: "
            f"leave bidirectional() out."
        )
    if any(getattr(b, "bidirectional", False) for b in scheme.bias):
        raise Mistake(f"{scheme} is made for encoders: give its bias one direction.")
    _try_positions(scheme, length)


def _try_positions(scheme: Scheme, length: int) -> None:
    """Draw a batch's positions and put them through every part that reads them: a table that is too
    short, or a policy whose numbers a part can't take, says so here and not in the first step."""
    pos = scheme.positions.ids(length, rng=torch.Generator().manual_seed(0))
    dims, rows = Dims(8, 2, 4), as_tensor(pos)
    if scheme.embed:
        x = torch.zeros(1, length, dims.dim)
        weights = scheme.embed.init(dims, None)
        scheme.embed.embed(x, rows, weights)
    for bias in scheme.bias:
        if rows.is_floating_point() and isinstance(bias, WHOLE):
            raise Mistake(
                f"{scheme.positions} draws positions that are not whole, which {bias} has no entry "
                f"for: use it with rope(), sinusoidal() or alibi()."
            )
