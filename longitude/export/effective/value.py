"""What a runtime computes, as one value; and what every runtime's file here starts from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effective:
    """What a runtime's own code makes of its settings."""

    inv_freq: tuple[float, ...]  # empty where it does not start
    attention: float  # on cosine and on sine each
    length: int  # positions that it serves at most
    traps: tuple[str, ...] = ()  # names in longitude.export.traps, in the order they were met
