"""What a text leaves out, a checkpoint fills in: base, layout, share, scaling, masks of each layer.

A text asks for what it names. `rope(remap=rerope(4096))` keeps the model's own base and layout, and
each layer keeps a window of its own and stays unturned where it was. What a text names against the
checkpoint (other pairs, another share of the head, a kind of position the model was not trained
with) is refused, unless forced. A part at its default counts as left out; to have a default in
place of the checkpoint's own value, write it out: rope(base=10000).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from longitude.core.part import Dims
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.parts import Bidirectional, Causal, Rope, Sequential

FIELDS = [field.name for field in dataclasses.fields(Rope)]
FIXED = ("fraction", "pairs", "decay")  # of the weights: they were trained with these


def merge_scheme(
    asked: str | Scheme | Layers, own: Sequence[Scheme], trained: int | None, force: bool = False
) -> list[Scheme]:
    """The scheme of every layer: what was asked for, the rest from the layer's own."""
    text = str(asked)
    scheme = parse(text) if isinstance(asked, str) else asked
    named = _named(text)
    full = []
    for index, mine in enumerate(own):
        given = scheme.layer(index, len(own))
        names = named[index % len(named)]
        full.append(_joined(given, names, mine, isinstance(scheme, Layers), force))
    if trained is not None and not force:
        for one in full:
            _check_window(one, trained)
    return full


def _named(text: str) -> list[set[str]]:
    """The fields of rope(…) that a text writes out, for each layer it names."""
    body = ast.parse(text.strip(), mode="eval").body
    if isinstance(body, ast.Call) and getattr(body.func, "id", "") == "layers":
        return [_written(node) for node in body.args]
    return [_written(body)]


def _written(node: ast.AST) -> set[str]:
    calls = [
        n
        for n in ast.walk(node)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "rope"
    ]
    return {
        name
        for call in calls
        for name in (*FIELDS[: len(call.args)], *(k.arg for k in call.keywords if k.arg))
    }


def _joined(given: Scheme, named: set[str], own: Scheme, layered: bool, force: bool) -> Scheme:
    _check_kind(given, own, force)
    mask = own.mask
    asked = tuple(m for m in given.mask if m not in (Causal(), Bidirectional()))
    plain = not any(m not in (Causal(), Bidirectional()) for m in own.mask)
    if asked and (plain or layered):  # a layer's own window is what it was trained with
        mask = (own.mask[0], *asked)
    return Scheme(
        rotary=_rotary(given.rotary, named, own.rotary, force),
        bias=given.bias or own.bias,
        scale=given.scale or own.scale,
        mask=mask,
    )


def _rotary(given: Rope | None, named: set[str], own: Rope | None, force: bool) -> Rope | None:
    if given is None or (own is None and not force):
        return own  # a layer that was never turned stays so
    if own is None:
        return given
    plain = Rope()
    took = {n for n in FIELDS if n in named or getattr(given, n) != getattr(plain, n)}
    if not force:
        for name in took & set(FIXED):
            mine, theirs = getattr(given, name), getattr(own, name)
            if mine != theirs:
                raise UserError(
                    f"the checkpoint was trained with rope({name}={theirs!r}), but got "
                    f"{name}={mine!r}: leave it out, or say force=True."
                )
    return dataclasses.replace(own, **{name: getattr(given, name) for name in took})


def _check_kind(given: Scheme, own: Scheme, force: bool) -> None:
    if given.positions != Sequential() or given.embed is not None:
        odd = given.embed or given.positions
        raise UserError(
            f"{shown(odd)} belongs before a model's first layer, and this checkpoint has "
            f"{shown(own)}: leave it out."
        )
    learned = [p for p in (*given.bias, *given.scale) if p.init(Dims(1, 1, 1), None)]
    if learned:
        raise UserError(
            f"{shown(learned[0])} has weights of its own, which this checkpoint was not trained "
            f"with: train one with it (longitude train)."
        )
    if given.bias and not own.bias and not force:
        raise UserError(
            f"this checkpoint was trained with {shown(own)}, but got {shown(given.bias[0])}: "
            f"leave it out, or say force=True."
        )


def _check_window(scheme: Scheme, trained: int) -> None:
    """A window of true distances may not reach beyond those a model was trained on."""
    rope = scheme.rotary
    parts: list[Any] = [rope.remap] if rope and rope.remap else []
    for part in parts:
        names = [n for n in ("window", "size", "local") if hasattr(part, n)]
        wide = max((getattr(part, n) for n in names), default=0)
        wide += getattr(part, "sinks", 0)  # which stand before the window
        if wide > trained:
            raise UserError(
                f"{shown(part)} shows true distances up to {wide}, but the checkpoint was trained "
                f"to {trained}: use a window of at most {trained}, half of it to be safe."
            )
