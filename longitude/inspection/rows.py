"""The four properties of a scheme, as plain values: what `longitude check` prints. No torch here.

Distances between codes are in scores: how far two scores of the same content lie apart, in the root
mean square over contents and heads, when content alone makes scores of variance 1.

Rows: what the pictures are made of. Plain values, so that reports need not import torch.

A distance of None is a hidden pair; an empty tuple is a picture that the scheme has nothing for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple


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


class PartRow(NamedTuple):
    """One part: where it acts, how it is written, what it means and who wrote it up."""

    site: str
    name: str
    written: str
    meaning: str
    paper: str


class PresetRow(NamedTuple):
    """One preset: its call, and the scheme of its defaults (None where it has no full set)."""

    name: str
    call: str
    scheme: str | None
    meaning: str
    paper: str


class DistanceRow(NamedTuple):
    """The distance that the rotation is told for a true distance, in tokens."""

    distance: int
    believed: float | None


class DecayRow(NamedTuple):
    """The mean cosine over rotary pairs from this distance to the next row's, its least and
    greatest value there, and the mean that plain RoPE of the same base has."""

    distance: int
    mean: float | None
    low: float | None
    high: float | None
    plain_rows: float


class WavelengthRow(NamedTuple):
    """A rotary pair's wavelength in tokens, as RoPE has it and as the scheme scales it (None: it
    stands still)."""

    pair: int
    plain_rows: float
    scaled: float | None
    state: str


class BiasRow(NamedTuple):
    """What is added to one head's scores at a distance; keys ahead of the query are below zero."""

    head: int
    distance: int
    bias: float | None


class ScaleRow(NamedTuple):
    """The factor on a query's logits, and how many keys it sees."""

    position: int
    seen: int
    factor: float


@dataclass(frozen=True)
class Grid:
    """Believed distances between a few tokens: a row for each query, a column for each key."""

    tokens: tuple[int, ...] = ()
    believed: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True)
class Sheet:
    """Everything about one scheme at one length; `layers` use it, where layers differ."""

    written: str
    layers: tuple[int, ...]
    parts: tuple[PartRow, ...]
    notes: tuple[str, ...]
    distances: tuple[DistanceRow, ...]
    decay: tuple[DecayRow, ...]
    wavelengths: tuple[WavelengthRow, ...]
    bias: tuple[BiasRow, ...]
    scale: tuple[ScaleRow, ...]
    visible: Grid


@dataclass(frozen=True)
class Page:
    """A scheme and the sheets of its distinct layers; `trained` is the length it names, if any."""

    written: str
    length: int
    dim: int
    heads: int
    trained: int | None
    sheets: tuple[Sheet, ...]


def plain_rows(value: Any) -> Any:
    """A row, or anything made of rows, as dictionaries and lists: ready for JSON."""
    if isinstance(value, (Page, Sheet, Grid)):
        return {name: plain_rows(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return [plain_rows(v) for v in value] if isinstance(value, tuple) else value
