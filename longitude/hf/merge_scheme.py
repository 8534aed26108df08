"""Completes a scheme from a checkpoint: base, layout, share, scaling and masks of each layer.

A scheme changes only what its text names. `rope(remap=rerope(4096))` keeps the model's base and
layout; each layer keeps its own window, and stays without rotation if it had none. A scheme that
names no encoding at all, such as `nope()`, removes the rotation, as `drope(…)` does. What
contradicts the checkpoint (another layout, another share of the head, a bias it was not trained
with) is refused unless forced. A field at its default counts as omitted; to have a default in place
of the checkpoint's value, write it out: rope(base=10000).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from longitude.core.part import Dims, Mask
from longitude.core.scheme import Layers, Scheme, Split
from longitude.core.text import as_scheme
from longitude.core.validate import UserError, shown
from longitude.parts import Bidirectional, Causal, Rope, Sequential

FIELDS = [field.name for field in dataclasses.fields(Rope)]
TRAINED_FIELDS = ("fraction", "pairs", "decay", "axes")  # the weights were trained with these


def merge_scheme(
    wanted: str | Scheme | Layers, own: Sequence[Scheme], trained: int | None, force: bool = False
) -> list[Scheme]:
    """Return the scheme of every layer: the wanted one, completed from the layer's own."""
    text = str(wanted)
    scheme = as_scheme(wanted)
    written = _written_fields(text)
    merged = []
    for index, own_layer in enumerate(own):
        place = scheme.place(index, len(own)) if isinstance(scheme, Layers) else 0
        layer, fields = scheme.layer(index, len(own)), written[place]
        _check_trainless(layer, own_layer, force)
        # keep the layer's direction and its own window, since it was trained with them
        local, layered = local_masks(layer), isinstance(scheme, Layers)
        local = local if layered or not local_masks(own_layer) else ()
        merged.append(
            Scheme(
                rotary=_merge_rotary(layer, fields, own_layer.rotary, force),
                bias=layer.bias or own_layer.bias,
                scale=layer.scale or own_layer.scale,
                mask=(own_layer.mask[0], *local) if local else own_layer.mask,
            )
        )
    for remap in [each.rotary.remap for each in merged if each.rotary and each.rotary.remap]:
        # a remap's window may not show distances beyond those the model was trained on
        names = [n for n in ("window", "size", "local", "shift") if hasattr(remap, n)]
        widest = max((getattr(remap, n) for n in names), default=0)
        widest += getattr(remap, "sinks", 0)  # sinks come before the window
        if trained is not None and widest > trained and not force:
            raise UserError(
                f"{shown(remap)} shows true distances up to {widest}, but the checkpoint was "
                f"trained to {trained}: use a window of at most {trained}, half of it to be safe."
            )
    return merged


def as_layers(schemes: Sequence[Scheme], asked: Scheme | Layers | None = None) -> Scheme | Layers:
    """Return the schemes of all layers as one value: a single scheme if they are equal, the
    requested split if they still form one, or else `Layers`."""
    if len(set(schemes)) == 1:
        return schemes[0]
    if isinstance(asked, Split):
        split, count = dataclasses.replace(asked, schemes=(schemes[0], schemes[-1])), len(schemes)
        if all(split.layer(n, count) == scheme for n, scheme in enumerate(schemes)):
            return split
    return Layers(tuple(schemes))


def _written_fields(text: str) -> list[set[str]]:
    """Return the fields of rope(…) that a text writes out, for each scheme that it names."""
    body: Any = ast.parse(text.strip(), mode="eval").body
    nodes = [body]
    if isinstance(body, ast.Call) and ast.unparse(body.func) == "layers":
        nodes = body.args
    elif isinstance(body, ast.Call) and ast.unparse(body.func) == "split":
        arguments = dict(zip(("near", "far"), body.args, strict=False))
        arguments |= {k.arg: k.value for k in body.keywords}
        nodes = [arguments.get(name, body.func) for name in ("near", "far")]
    return [
        {
            name
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "rope"
            for name in (*FIELDS[: len(call.args)], *(k.arg for k in call.keywords if k.arg))
        }
        for node in nodes
    ]


def local_masks(scheme: Scheme) -> tuple[Mask, ...]:
    return tuple(m for m in scheme.mask if m not in (Causal(), Bidirectional()))


def _merge_rotary(given: Scheme, fields: set[str], own: Rope | None, force: bool) -> Rope | None:
    rope = given.rotary
    if rope is None:
        names_nothing = not (given.bias or given.scale or local_masks(given))
        drops = any(getattr(part, "drops_rotation", False) for part in given.scale)
        return None if names_nothing or drops else own
    if own is None:
        return rope if force else None  # a layer that was trained without rotation stays so
    default = Rope()
    changed = {n for n in FIELDS if n in fields or getattr(rope, n) != getattr(default, n)}
    if not force:
        for name in changed & set(TRAINED_FIELDS):
            new, old = getattr(rope, name), getattr(own, name)
            if new != old:
                raise UserError(
                    f"the checkpoint was trained with rope({name}={old!r}), but got "
                    f"{name}={new!r}: leave it out, or in Python say force=True."
                )
    return dataclasses.replace(own, **{name: getattr(rope, name) for name in changed})


def _check_trainless(given: Scheme, own: Scheme, force: bool) -> None:
    """Raise for parts that only a checkpoint trained with them can have."""
    if given.positions != Sequential() or given.embed is not None:
        raise UserError(
            f"{shown(given.embed or given.positions)} acts before the first layer, on positions or "
            f"embeddings, which this checkpoint ({shown(own)}) was not trained with: leave it out."
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
            f"leave it out, or in Python say force=True."
        )
