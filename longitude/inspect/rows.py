"""Rows: what the pictures are made of. Plain values, so that reports need not import torch.

A distance of None is a hidden pair; an empty tuple is a picture that the scheme has nothing for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


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
    plain: float


class WavelengthRow(NamedTuple):
    """A rotary pair's wavelength in tokens, as RoPE has it and as the scheme scales it (None: it
    stands still)."""

    pair: int
    plain: float
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


def plain(value: Any) -> Any:
    """A row, or anything made of rows, as dictionaries and lists: ready for JSON."""
    if isinstance(value, (Page, Sheet, Grid)):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return [plain(v) for v in value] if isinstance(value, tuple) else value
