"""Searching and judging apart: what was found on some documents has to prove itself on others.

A search picks what happened to suit its documents, so its own losses flatter it. Half of the
documents, drawn by the seed, are for searching; on the other half, which no step of the search ever
reads, the winner stands against where it started, document by document. Only a gain whose 95 %
interval lies above zero counts: otherwise the start is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from longitude.eval.statistics import Interval, paired
from longitude.extend.search.halving import Readings, Score
from longitude.fields import Mistake

FEWEST = 4  # documents: two to search on, two to judge on


@dataclass(frozen=True)
class Found:
    """What a search came to. `scheme` is the one to use: the winner, or the start where the gain
    can't be told from zero. `gain` is the start's loss minus the winner's, on judged documents;
    None where one of them was refused there. `tried` counts schemes, the start included."""

    scheme: str
    start: str
    winner: str
    gain: Interval | None
    tried: int
    search_documents: tuple[int, ...]
    judged_documents: tuple[int, ...]

    @property
    def better(self) -> bool:
        """Whether the search led anywhere."""
        return self.scheme != self.start


def apart(documents: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The documents to search on and those to judge on."""
    if documents < FEWEST:
        raise Mistake(
            f"--search needs documents to search on and others to judge on, but got {documents}: "
            f"give at least {FEWEST}."
        )
    drawn = Random(f"{seed} documents").sample(range(documents), documents)
    return tuple(drawn[: documents // 2]), tuple(drawn[documents // 2 :])


def judge(
    score: Score,
    start: str,
    winner: str,
    tried: int,
    searched: Sequence[int],
    judged: Sequence[int],
) -> Found:
    """The winner against its start, on documents set apart."""
    readings = Readings(score)
    before, after = readings.losses(start, judged), readings.losses(winner, judged)
    if math.inf in before or math.inf in after:
        gain, helps = None, math.inf not in after
    else:
        gain = paired(before, after)
        helps = gain.clear and gain.mean > 0
    scheme = winner if helps else start
    return Found(scheme, start, winner, gain, tried, tuple(searched), tuple(judged))
