"""Successive halving: many schemes are read on one document, the better half on twice as many.

Jamieson & Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (arXiv:1502.07943); the inner loop of Hyperband (Li et al. 2018, arXiv:1603.06560).
Each round compares means over the same documents, so what a document adds to every loss cancels. A
reading is one scheme on one document: budgets count readings, and none is made twice. `evolve`
repeats the halving on what is bred from its survivors, each time with the documents in another
order.

Searching and judging apart: what was found on some documents has to prove itself on others.

A search picks what happened to suit its documents, so its own losses flatter it. Half of the
documents, drawn by the seed, are for searching; on the other half, which no step of the search ever
reads, the winner stands against where it started, document by document. Only a gain whose 95 %
interval lies above zero counts: otherwise the start is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from longitude.core.validate import UserError
from longitude.eval.stats import Interval, paired

Score = Callable[[str, Sequence[int]], Sequence[float]]  # a scheme, documents -> a loss for each
News = Callable[[int, int, str], None]  # this round, of how many, what it reads
Breed = Callable[[Sequence[str], int, int], list[str]]  # parents, how many, generation -> children
FEW = 2  # schemes that are read on all documents, at least
SMALLEST = 4  # schemes that a halving starts with, at least
WORTHWHILE = 6  # schemes of a generation; a small budget has fewer generations rather


def quiet(round: int, of: int, text: str) -> None:
    """News that nobody reads."""


class Readings:
    """Every loss known so far, asked for once; a scheme refused on one document is refused."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._known: dict[str, dict[int, float]] = {}

    @property
    def spent(self) -> int:
        """Readings so far."""
        return sum(map(len, self._known.values()))

    @property
    def tried(self) -> int:
        """Schemes so far."""
        return len(self._known)

    def losses(self, scheme: str, documents: Sequence[int]) -> list[float]:
        """One for each document; infinite where refused."""
        known = self._known.setdefault(scheme, {})
        missing = [one for one in documents if one not in known]
        if math.inf in known.values() or not missing:
            return [known.get(one, math.inf) for one in documents]
        found = [math.inf if math.isnan(loss) else loss for loss in self._score(scheme, missing)]
        known.update(zip(missing, found, strict=True))
        return [known[one] for one in documents]

    def complete(self, scheme: str, documents: Sequence[int]) -> bool:
        """Whether nothing is left to read."""
        known = self._known.get(scheme, {})
        return math.inf in known.values() or known.keys() >= set(documents)

    def mean(self, scheme: str, documents: Sequence[int]) -> float:
        return math.fsum(self.losses(scheme, documents)) / len(documents)


def schedule(schemes: int, documents: int) -> list[tuple[int, int]]:
    """Rounds, as how many schemes are read on how many documents."""
    rounds, read = [(schemes, 1)], 1
    while read < documents:
        read = min(2 * read, documents)
        rounds.append((min(schemes, max(FEW, rounds[-1][0] // 2)), read))
    return rounds


def cost(schemes: int, documents: int, known: int = 0) -> int:
    """The readings of a halving, at most: later rounds add to the documents of earlier ones, and of
    some schemes everything is known."""
    added = pairwise([(0, 0), *schedule(schemes, documents)])
    new = schemes - known
    return sum(min(kept, new) * (read - before) for (_, before), (kept, read) in added)


def affordable(budget: int, documents: int, known: int = 0) -> int:
    """The most schemes that a halving can start with, those included of which all is known."""
    schemes = known
    while cost(schemes + 1, documents, known) <= budget:
        schemes += 1
    return schemes


def halve(
    readings: Readings, schemes: Sequence[str], documents: Sequence[int], news: News = quiet
) -> list[str]:
    """The schemes that were read on all documents, best first; of equals the one named first."""
    left, rounds = list(dict.fromkeys(schemes)), schedule(len(set(schemes)), len(documents))
    for index, (keep, read) in enumerate(rounds):
        left = left[:keep]
        news(index + 1, len(rounds), f"{_count(len(left), 'scheme')} on {_count(read, 'document')}")
        left.sort(key=lambda scheme: readings.mean(scheme, documents[:read]))
    return left


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def evolve(
    readings: Readings,
    roots: Sequence[str],
    breed: Breed,
    documents: Sequence[int],
    budget: int,
    generations: int,
    rng: Random,
    news: News = quiet,
) -> str:
    """The best scheme found from these roots within so many readings, on all these documents."""
    limit, pool, order = readings.spent + budget, list(roots), list(documents)
    generations = max(1, min(generations, budget // cost(WORTHWHILE, len(order))))
    for generation in range(generations):
        share = (limit - readings.spent) // (generations - generation)
        known = sum(readings.complete(scheme, order) for scheme in pool)
        born = breed(pool, max(0, affordable(share, len(order), known) - len(pool)), generation)
        rng.shuffle(order)
        pool = halve(readings, [*pool, *born], order, news)[:FEW]
    return pool[0]


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
        raise UserError(
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
