"""The neighbourhood of a scheme: the same parts with other parameters, and logn on or off.

A neighbour changes one part or several, each to a value that the rules of `grids` allow; every
other one changes a single parameter of a part, so that a good scheme is also looked at closely.
Where layers differ, those that see the whole text change and those under a window stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.extension.search.grids import Setting, Span, changes, values
from longitude.parts import Chunked, LogN, Rope, Window

TRIES = 10  # draws for each neighbour that is asked for; a small space runs out of new ones


@dataclass(frozen=True)
class Axis:
    """A part that can vary, and the settings it may take: all, and those that change one thing. Of
    logn (None where there is none) the one setting is to switch it."""

    now: Any
    far: Sequence[Setting]
    near: Sequence[Setting] = ()

    def drawn(self, rng: Random, span: Span) -> Any:
        """Another part in its place, or None."""
        if not self.far:
            return LogN(span.trained) if self.now is None else None
        near = self.near and rng.random() < 0.5
        return replace(self.now, **rng.choice(self.near if near else self.far))


def starts(leaders: Sequence[str], trained: int, target: int) -> list[str]:
    """The leaders in their written form: each once, in order, those that can vary at all."""
    span, found = Span(trained, target), []
    for leader in leaders:
        try:
            scheme = parse(leader)
        except UserError:
            continue
        if axes(scheme, span):
            found.append(dump(scheme))
    return list(dict.fromkeys(found))


def neighbours(scheme_text: str, trained: int, target: int, rng: Random, count: int) -> list[str]:
    """Up to this many other schemes near this one, each once; fewer where there are no more."""
    scheme, span = parse(scheme_text), Span(trained, target)
    around, found = axes(scheme, span), dict[str, None]()
    count = min(count, math.prod(len(axis.far or "1") + 1 for axis in around) - 1)
    for _ in range(TRIES * count):
        if len(found) >= count:
            break
        text = _drawn(scheme, around, rng, span)
        if text is not None:
            found[text] = None
    return list(found)


def axes(scheme: Scheme | Layers, span: Span) -> list[Axis]:
    """What of a scheme can vary."""
    parts = dict.fromkeys(part for one in _wide(scheme) for part in _inside(one))
    settings = {part: values(part, span) for part in parts}
    found = [
        Axis(part, far, [one for one in far if changes(part, one) == 1])
        for part, far in settings.items()
        if far
    ]
    return [*found, *_logn(scheme)]


def _logn(scheme: Scheme | Layers) -> list[Axis]:
    """On and off, in a scheme that has no other factor on its queries."""
    scales = list(dict.fromkeys(part for one in _wide(scheme) for part in one.scale))
    return [Axis(part, ()) for part in scales or [None] if part is None or isinstance(part, LogN)]


def _inside(scheme: Scheme) -> list[Any]:
    rope = scheme.rotary
    return [*scheme.parts, *((rope.frequencies, rope.remap) if rope else ())]


def _wide(scheme: Scheme | Layers) -> tuple[Scheme, ...]:
    """The layers that see the whole text; all of them where none does."""
    if isinstance(scheme, Scheme):
        return (scheme,)
    return tuple(filter(_sees_all, scheme.schemes)) or scheme.schemes


def _sees_all(scheme: Scheme) -> bool:
    return not any(isinstance(mask, Window | Chunked) for mask in scheme.mask)


def _drawn(scheme: Scheme | Layers, around: Sequence[Axis], rng: Random, span: Span) -> str | None:
    """A scheme with some axes moved; None where its parts don't go together."""
    moved = rng.sample(around, rng.randint(1, len(around)))
    try:
        for axis in moved:
            scheme = swapped(scheme, axis.now, axis.drawn(rng, span))
    except UserError:
        return None
    return dump(scheme)


def swapped(scheme: Scheme | Layers, old: Any, new: Any) -> Scheme | Layers:
    """The scheme with one part in place of another; None stands for no part."""
    if isinstance(scheme, Layers):
        wide = _wide(scheme)
        changed = [_changed(s, old, new) if s in wide else s for s in scheme.schemes]
        return Layers(tuple(changed))
    return _changed(scheme, old, new)


def _changed(scheme: Scheme, old: Any, new: Any) -> Scheme:
    parts = [_within(part, old, new) for part in scheme.parts]
    added = [new] if old is None else []
    return Scheme.of(*(part for part in (*parts, *added) if part is not None))


def _within(part: Any, old: Any, new: Any) -> Any:
    if part == old:
        return new
    if not isinstance(part, Rope) or old is None:
        return part
    if part.frequencies == old:
        return replace(part, frequencies=new)
    return replace(part, remap=new) if part.remap == old else part
