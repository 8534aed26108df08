"""The neighbourhood of a scheme: the same parts with other parameters, and logn on or off.

A neighbour changes one part or several, each to a setting of the part's own `grid`
(`core/part.py`); every other one changes a single parameter of a part, so that a good scheme is
also examined closely. Where layers differ, those that see the full context change and those under a
window stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from longitude.core.lengths import Lengths, Setting
from longitude.core.part import optional
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.parts import LogN, Rope

TRIES = 10  # draws per neighbour; a small space runs out of new ones


@dataclass(frozen=True)
class Axis:
    """A part that can vary and the settings it may take: all, and those that change one parameter.
    Of logn (None where there is none) the one setting is to switch it."""

    part: Any
    settings: Sequence[Setting]
    single: Sequence[Setting] = ()

    def drawn(self, rng: Random, lengths: Lengths) -> Any:
        """Another part in its place, or None."""
        if not self.settings:
            return LogN(lengths.trained) if self.part is None else None
        single = self.single and rng.random() < 0.5
        return replace(self.part, **rng.choice(self.single if single else self.settings))


def starts(leaders: Sequence[str], trained: int, target: int) -> list[str]:
    """The leaders' texts, each once and in order, those that can vary at all."""
    lengths, texts = Lengths(trained, target), []
    for leader in leaders:
        try:
            scheme = parse(leader)
        except UserError:
            continue
        if axes(scheme, lengths):
            texts.append(dump(scheme))
    return list(dict.fromkeys(texts))


def neighbours(scheme_text: str, trained: int, target: int, rng: Random, count: int) -> list[str]:
    """Up to this many other schemes near this one, each once; fewer where there are no more."""
    scheme, lengths = parse(scheme_text), Lengths(trained, target)
    around, texts = axes(scheme, lengths), dict[str, None]()
    count = min(count, math.prod(len(axis.settings or "1") + 1 for axis in around) - 1)
    for _ in range(TRIES * count):
        if len(texts) >= count:
            break
        changed: Scheme | Layers | None = scheme
        try:
            for axis in rng.sample(around, rng.randint(1, len(around))):
                changed = _replaced(changed, axis.part, axis.drawn(rng, lengths))
        except UserError:  # these parts don't go together
            continue
        texts[dump(changed)] = None
    return list(texts)


def axes(scheme: Scheme | Layers, lengths: Lengths) -> list[Axis]:
    """What of a scheme can vary: parts with a grid, and logn if the scheme has no other scale."""
    wide = _wide(scheme)
    parts = dict.fromkeys(part for one in wide for part in _parts(one))
    axes = []
    for part in parts:
        changes = [
            (_changes(part, setting), setting) for setting in optional(part, "grid", lengths)
        ]
        if settings := [setting for count, setting in changes if count]:
            axes.append(Axis(part, settings, [s for count, s in changes if count == 1]))
    scales = list(dict.fromkeys(part for one in wide for part in one.scale))
    return [*axes, *(Axis(p, ()) for p in scales or [None] if p is None or isinstance(p, LogN))]


def _changes(part: Any, setting: Setting) -> int:
    """How many parameters of the part a setting changes."""
    return sum(getattr(part, name) != value for name, value in setting.items())


def _parts(scheme: Scheme) -> list[Any]:
    rope = scheme.rotary
    return [*scheme.parts, *((rope.frequencies, rope.remap) if rope else ())]


def _wide(scheme: Scheme | Layers) -> tuple[Scheme, ...]:
    """The layers that see the full context; all of them where none does."""
    if isinstance(scheme, Scheme):
        return (scheme,)
    return tuple(one for one in scheme.schemes if not one.windowed) or scheme.schemes


def _replaced(scheme: Scheme | Layers, old: Any, new: Any) -> Scheme | Layers:
    """The scheme with one part in place of another; None stands for no part."""
    if isinstance(scheme, Layers):
        wide = _wide(scheme)
        layers = (_replaced(one, old, new) if one in wide else one for one in scheme.schemes)
        return Layers(tuple(layers))  # type: ignore[arg-type]
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
