"""The four properties of a scheme, as plain values: what `longitude check` prints. No torch here.

Distances between codes are in scores: how far two scores of the same content lie apart, in the root
mean square over contents and heads, when content alone makes scores of variance 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Uniqueness:
    """The smallest distance between the codes of two keys that the last query sees.

    `pair` are two keys so close, `shared` how many of the `compared` keys have another's code.
    """

    least: float | None
    pair: tuple[int, int] | None
    shared: int
    compared: int


@dataclass(frozen=True)
class Extrapolation:
    """What changes from the trained length to this one.

    `reach` is how many positions have a code at all, and `refused` the sentence about the next one.
    `believed` is the largest distance that the rotation is told, `unseen` how many of its `pairs`
    meet angles that training never showed them, `novelty` by site how far the strangest code lies
    from all those of training, `scale` the factor on the last query's logits, `hidden` the share of
    keys that it doesn't see.
    """

    trained: int
    length: int
    reach: int
    refused: str | None
    believed: float | None
    unseen: int | None
    pairs: int | None
    novelty: dict[str, float]
    scale: float
    hidden: float

    @property
    def strangest(self) -> float | None:
        """The novelty of all sites together; None where positions have no code at all."""
        return None if self.refused else math.hypot(*self.novelty.values())


@dataclass(frozen=True)
class Relativity:
    """How far scores are from a function of i - j: the root of what their variance is among pairs
    of one distance. `share` is that over the root of their whole variance, `uneven` the share of
    distances that some queries see and others don't. All are exactly 0 where scores are such a
    function, and only there. `inner` is the share for the inner product p_i·p_j of an embedding's
    vectors alone, which is all that a score has of them if nothing projects them."""

    spread: float
    share: float
    uneven: float
    inner: float | None

    @property
    def exact(self) -> bool:
        """Whether position enters as i - j alone."""
        return self.spread == 0 and self.uneven == 0


@dataclass(frozen=True)
class Curve:
    """What one thing about a key does with its distance r from the last query.

    `falls_to` is the distance where it has fallen as low as it ever does, in means between `rows`,
    and `least` that mean; `negative` the first distance below zero; `rises` the share of steps from
    r to r + 1 at which it rises.
    """

    name: str
    rows: tuple[tuple[int, float | None], ...]
    start: float
    least: float
    falls_to: int
    last: float
    negative: int | None
    rises: float


@dataclass(frozen=True)
class Properties:
    """The four of one scheme; `layers` use it, where layers differ."""

    written: str
    layers: tuple[int, ...]
    uniqueness: Uniqueness
    extrapolation: Extrapolation
    relativity: Relativity
    decay: tuple[Curve, ...]
    notes: tuple[str, ...]

    def curve(self, name: str) -> Curve | None:
        """One curve, where the scheme has it."""
        return next((c for c in self.decay if c.name == name), None)


@dataclass(frozen=True)
class Checked:
    """A scheme with the properties of its distinct layers; `name` is a preset's, where it has one,
    and `refused` the sentence why a scheme could not be measured."""

    written: str
    length: int
    dim: int
    heads: int
    sheets: tuple[Properties, ...]
    name: str | None = None
    refused: str | None = None

    def plain(self) -> dict[str, Any]:
        """Ready for JSON."""
        return plain(self)


def plain(value: Any) -> Any:
    """Values as dictionaries and lists; numbers that JSON lacks become None."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
