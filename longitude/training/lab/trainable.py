"""Which schemes can be trained, and what becomes of a scheme when training is over.

Some parts are for training alone: positions that are drawn (randomized, equal-mean, PoSE) and
inverse leaky ReRoPE, whose model reads with plain RoPE. Remaps made for inference move distances
that a model has learned already, so there is nothing in them to train.

Every trainable encoding of the library, each at the sizes that suit a training window.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from longitude.core.part import Dims, as_tensor
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.parts import T5, Deberta, InverseLeaky, Shaw, TransformerXl

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
        raise UserError(
            f"{shown(remap)} is made for reading with a trained model, so it can't be trained: "
            f"train {shown(replace(scheme.rotary, remap=None))} and read with the remap."  # type: ignore[type-var]
        )
    if not scheme.causal:
        raise UserError(
            f"{scheme} lets tokens see those ahead, which a decoder must predict: "
            f"leave bidirectional() out."
        )
    if any(getattr(b, "bidirectional", False) for b in scheme.bias):
        raise UserError(f"{scheme} is made for encoders: give its bias one direction.")
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
            raise UserError(
                f"{scheme.positions} draws positions that are not whole, which {bias} has no entry "
                f"for: use it with rope(), sinusoidal() or alibi()."
            )


def every(length: int, layers: int) -> tuple[str, ...]:
    """One scheme for each encoding that can be trained on `length` tokens."""
    quarter = max(2, length // 4)
    return (
        "causal()",  # no positions at all
        f"learned({length})",
        f"hierarchical({length})",
        f"multiplicative({length})",
        "sinusoidal()",
        "floater()",
        "rope()",
        "rope(decay=xpos())",
        f"rope(remap=inverse_leaky({quarter}, 16))",
        f"rope() + logn({length}, clip=False)",
        "rope() + ssmax()",
        f"rope() + window({quarter})",
        f"randomized({16 * length}) + rope()",
        f"equal_mean({length}) + rope()",
        f"pose({16 * length}) + rope()",
        "alibi()",
        "t5()",
        "kerple_log()",
        "kerple_power()",
        "sandwich()",
        f"fire(threshold={length})",
        f"shaw({quarter})",
        "transformer_xl()",
        f"deberta({length})",
        dump(parse(f"hwfa({length}, layers={layers}, window={hwfa_window(length, layers)})")),
    )


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
