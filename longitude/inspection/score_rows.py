"""What attention scores of a checkpoint do with distance, as plain values. No torch here.

A score is what softmax is given. Distances are |i - j|; what lies from the trained length on is
past the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longitude.inspection.rows import plain

SINK = 0.3  # of a head's attention on the first token (Gu et al. 2024, arXiv:2410.10781)
USES = 0.1  # of the variance of its scores that distance explains


@dataclass(frozen=True)
class Band:
    """Scores of some pairs: how many, their mean, spread, least and greatest, and how much of the
    attention falls on them."""

    count: int
    mean: float
    std: float
    least: float
    greatest: float
    mass: float


@dataclass(frozen=True)
class Bin:
    """The scores of distances from this one to the next bin's."""

    distance: int
    scores: Band


@dataclass(frozen=True)
class Moved:
    """Queries and keys of the text at distances they never had: Re Σ_t h_t e^(irθ_t) for r inside
    the trained length and past it, at its largest, and Σ_t |h_t|, which no distance can exceed."""

    inside: float
    past: float
    ceiling: float


@dataclass(frozen=True)
class HeadRow:
    """One head. `position` is the share of the variance of its scores, each query's mean taken off,
    that distance explains; `sink` its attention on the first token; `away` how far it looks on
    average."""

    head: int
    inside: Band
    past: Band | None
    position: float
    sink: float
    away: float
    moved: Moved | None
    bins: tuple[Bin, ...]

    @property
    def uses_position(self) -> bool:
        """Whether distance explains a good part of what it sees."""
        return self.position >= USES

    @property
    def is_sink(self) -> bool:
        """Whether it leaves much of its attention on the first token."""
        return self.sink >= SINK


@dataclass(frozen=True)
class LayerRow:
    """One layer, with the scheme it has."""

    layer: int
    written: str
    heads: tuple[HeadRow, ...]


@dataclass(frozen=True)
class Term:
    """One of the four terms of a head's scores: its root mean square, and that of what is left when
    each query's mean is taken off, which is all that softmax sees."""

    name: str
    size: float
    felt: float


@dataclass(frozen=True)
class HeadTerms:
    """The four terms of one head, and of their sum."""

    head: int
    terms: tuple[Term, ...]
    whole: Term


@dataclass(frozen=True)
class FourTerms:
    """The expansion of the scores of one layer."""

    layer: int
    pairs: int
    heads: tuple[HeadTerms, ...]


@dataclass(frozen=True)
class Measured:
    """What was measured of a checkpoint on a text of `length` tokens, of `queries` of them."""

    model: str
    scheme: str
    trained: int | None
    length: int
    queries: int
    text: str
    layers: tuple[LayerRow, ...]
    terms: FourTerms | None
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Ready for JSON."""
        return plain(self)
