"""What the inspection commands compute, as plain values without torch; field names are JSON keys.

Distances between codes are in units of scores: the root mean square, over contents and heads, of
the difference of two scores of the same content, where content alone gives scores of variance 1.
A distance of None is a hidden pair; an empty tuple means that the scheme has nothing to draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

SINK = 0.3  # share of a head's attention on the first token (Gu et al. 2024, arXiv:2410.10781)
USES = 0.1  # share of the variance of its scores that distance explains


def plain(value: Any) -> Any:
    """Convert rows, however nested, to dictionaries and lists; nan and infinity become None."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# schemes: the catalogue


class PartRow(NamedTuple):
    """One part: where it acts, how it is written, what it means and its paper."""

    site: str
    name: str
    written: str
    meaning: str
    paper: str


class PresetRow(NamedTuple):
    """One preset: its call, and the scheme of its defaults (None if an argument is required)."""

    name: str
    call: str
    scheme: str | None
    meaning: str
    paper: str


# show: what a scheme does with distance


class DistanceRow(NamedTuple):
    """The distance that the rotation uses at a true distance, in tokens."""

    distance: int
    believed: float | None


class DecayRow(NamedTuple):
    """The mean cosine over rotary pairs from this distance to the next row's, its minimum and
    maximum there, and the mean of unscaled RoPE with the same base."""

    distance: int
    mean: float | None
    low: float | None
    high: float | None
    plain: float


class WavelengthRow(NamedTuple):
    """A rotary pair's wavelength in tokens, unscaled and scaled (None: frequency 0)."""

    pair: int
    plain: float
    scaled: float | None
    state: str


class BiasRow(NamedTuple):
    """What is added to one head's scores at a distance; negative distances lie ahead."""

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
    """Remapped distances between a few tokens: a row per query, a column per key."""

    tokens: tuple[int, ...] = ()
    believed: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True)
class Sheet:
    """Everything about one scheme at one length; `layers` use it, if layers differ."""

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
    """A scheme with a sheet for each distinct layer; `trained` is the length it names, if any."""

    written: str
    length: int
    dim: int
    heads: int
    trained: int | None
    sheets: tuple[Sheet, ...]


# check: properties


@dataclass(frozen=True)
class Uniqueness:
    """The smallest distance between the codes of two keys that the last query sees."""

    least: float | None
    pair: tuple[int, int] | None  # the two keys at that distance
    shared: int  # keys that share their code with another key
    compared: int


@dataclass(frozen=True)
class Extrapolation:
    """What changes from the trained length to this one."""

    trained: int
    length: int
    reach: int  # positions that have a code at all
    refused: str | None  # the error for the next position
    believed: float | None  # largest distance that the rotation uses
    unseen: int | None  # rotary pairs that meet angles outside the trained range
    pairs: int | None
    novelty: dict[str, float]  # by site: largest distance from a code to the nearest trained one
    scale: float  # factor on the last query's logits
    hidden: float  # share of keys that the last query doesn't see

    @property
    def total_novelty(self) -> float | None:
        """The novelty of all sites together; None if positions have no code at all."""
        return None if self.refused else math.hypot(*self.novelty.values())


@dataclass(frozen=True)
class Relativity:
    """How far scores are from a function of i - j: exactly 0 if and only if they are one."""

    spread: float  # root of the mean variance among pairs of one distance
    share: float  # the same over the root of the total variance
    uneven: float  # share of distances that some queries see and others don't
    inner: float | None  # `share` for the inner products p_i·p_j of an embedding's vectors alone

    @property
    def exact(self) -> bool:
        return self.spread == 0 and self.uneven == 0


@dataclass(frozen=True)
class Curve:
    """A quantity by the distance r of a key from the last query, sampled at `rows`."""

    name: str
    rows: tuple[tuple[int, float | None], ...]  # r and the value there; None if the key is hidden
    start: float  # the value at the smallest visible distance
    least: float  # the minimum
    falls_to: int  # the first distance at which the minimum is reached
    last: float  # the value at the largest visible distance
    negative: int | None  # the first distance at which it is below zero
    rises: float  # share of steps from r to r + 1 at which it rises


@dataclass(frozen=True)
class Properties:
    """The four properties of one scheme; `layers` are those that use it, if layers differ."""

    written: str
    layers: tuple[int, ...]
    uniqueness: Uniqueness
    extrapolation: Extrapolation
    relativity: Relativity
    decay: tuple[Curve, ...]
    notes: tuple[str, ...]

    def curve(self, name: str) -> Curve | None:
        return next((c for c in self.decay if c.name == name), None)


@dataclass(frozen=True)
class SchemeProperties:
    """A scheme with the properties of its distinct layers; `name` is that of a preset, `refused`
    the reason why it could not be measured."""

    written: str
    length: int
    dim: int
    heads: int
    sheets: tuple[Properties, ...]
    name: str | None = None
    refused: str | None = None


# inspect --weights: attention scores of a checkpoint; distances are |i - j|


@dataclass(frozen=True)
class Band:
    """The scores (softmax inputs) of a set of pairs, and the share of attention on them."""

    count: int
    mean: float
    std: float
    least: float
    greatest: float
    mass: float


@dataclass(frozen=True)
class Bin:
    """The scores of pairs whose distance lies between this one and the next bin's."""

    distance: int
    scores: Band


@dataclass(frozen=True)
class Moved:
    """Maxima of |Re Σ_t h_t e^(irθ_t)|, h_t = q_t k*_t from the text, for r inside the trained
    length and past it; and Σ_t |h_t|, which no distance can exceed."""

    inside: float
    past: float
    ceiling: float


@dataclass(frozen=True)
class HeadRow:
    """One head; `position` is the share of the variance of its scores, less each query's mean, that
    distance explains."""

    head: int
    inside: Band
    past: Band | None
    position: float
    sink: float  # attention on the first token
    away: float  # mean distance of attention
    moved: Moved | None
    bins: tuple[Bin, ...]

    @property
    def uses_position(self) -> bool:
        return self.position >= USES


@dataclass(frozen=True)
class LayerRow:
    """One layer, with its scheme."""

    layer: int
    written: str
    heads: tuple[HeadRow, ...]


@dataclass(frozen=True)
class Term:
    """One term of a head's scores: its root mean square, and that of what softmax sees of it (with
    each query's mean removed)."""

    name: str
    size: float
    felt: float


@dataclass(frozen=True)
class HeadTerms:
    """The four terms of one head's scores, and their sum."""

    head: int
    terms: tuple[Term, ...]
    whole: Term


@dataclass(frozen=True)
class QKTerms:
    """The decomposition of one layer's scores."""

    layer: int
    pairs: int
    heads: tuple[HeadTerms, ...]


@dataclass(frozen=True)
class ScoreStatistics:
    """What was measured of a checkpoint on `length` tokens, for `queries` of them."""

    model: str
    scheme: str
    trained: int | None
    length: int
    queries: int
    text: str
    layers: tuple[LayerRow, ...]
    terms: QKTerms | None
    notes: tuple[str, ...]
