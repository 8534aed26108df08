"""Successive halving: many schemes are scored on one document, the better half on twice as many.

Jamieson & Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (arXiv:1502.07943); the inner loop of Hyperband (Li et al. 2018, arXiv:1603.06560).
Each round compares means over the same documents, so what a document adds to every loss cancels.
Budgets count losses of one scheme on one document, and none is computed twice. `evolve` repeats
the halving on what is bred from its survivors, each time with the documents in another order.

A search picks what happened to suit its documents, so its own losses flatter it. Half of the
documents, drawn by the seed, are for searching; on the other half, which no step of the search
ever sees, `judge` compares the winner with its start, document by document. Only a gain whose 95
% interval lies above zero counts: otherwise the start is kept.
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
Report = Callable[[int, int, str], None]  # this round, of how many, what it scores
Breed = Callable[[Sequence[str], int, int], list[str]]  # parents, how many, generation -> children
SURVIVORS = 2  # schemes that are scored on all documents, at least
SMALLEST = 4  # schemes that a halving starts with, at least
WORTHWHILE = 6  # schemes of a generation; a small budget has fewer generations instead
MIN_DOCUMENTS = 4  # two to search on, two to judge on


def ignore(done: int, total: int, stage: str) -> None:
    """Report nothing."""


class Losses:
    """Every loss known so far, scored once; a scheme refused on one document is refused."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._known: dict[str, dict[int, float]] = {}

    @property
    def spent(self) -> int:
        """Losses so far."""
        return sum(map(len, self._known.values()))

    @property
    def tried(self) -> int:
        """Schemes so far."""
        return len(self._known)

    def of(self, scheme: str, documents: Sequence[int]) -> list[float]:
        """One for each document; infinite where refused."""
        known = self._known.setdefault(scheme, {})
        missing = [one for one in documents if one not in known]
        if math.inf in known.values() or not missing:
            return [known.get(one, math.inf) for one in documents]
        new = [math.inf if math.isnan(loss) else loss for loss in self._score(scheme, missing)]
        known.update(zip(missing, new, strict=True))
        return [known[one] for one in documents]

    def complete(self, scheme: str, documents: Sequence[int]) -> bool:
        """Whether nothing is left to score."""
        known = self._known.get(scheme, {})
        return math.inf in known.values() or known.keys() >= set(documents)

    def mean(self, scheme: str, documents: Sequence[int]) -> float:
        return math.fsum(self.of(scheme, documents)) / len(documents)


def schedule(schemes: int, documents: int) -> list[tuple[int, int]]:
    """Rounds, as how many schemes are scored on how many documents."""
    rounds, scored = [(schemes, 1)], 1
    while scored < documents:
        scored = min(2 * scored, documents)
        rounds.append((min(schemes, max(SURVIVORS, rounds[-1][0] // 2)), scored))
    return rounds


def cost(schemes: int, documents: int, known: int = 0) -> int:
    """The losses of a halving, at most: later rounds add to the documents of earlier ones, and of
    some schemes everything is known."""
    added = pairwise([(0, 0), *schedule(schemes, documents)])
    new = schemes - known
    return sum(min(left, new) * (scored - before) for (_, before), (left, scored) in added)


def affordable(budget: int, documents: int, known: int = 0) -> int:
    """The most schemes that a halving can start with, including those that are fully known."""
    schemes = known
    while cost(schemes + 1, documents, known) <= budget:
        schemes += 1
    return schemes


def halve(
    losses: Losses, schemes: Sequence[str], documents: Sequence[int], report: Report = ignore
) -> list[str]:
    """The schemes that were scored on all documents, best first; of equals the one named first."""
    left, rounds = list(dict.fromkeys(schemes)), schedule(len(set(schemes)), len(documents))
    for index, (keep, scored) in enumerate(rounds):
        left = left[:keep]
        stage = f"{_count(len(left), 'scheme')} on {_count(scored, 'document')}"
        report(index + 1, len(rounds), stage)
        left.sort(key=lambda scheme: losses.mean(scheme, documents[:scored]))
    return left


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def evolve(
    losses: Losses,
    roots: Sequence[str],
    breed: Breed,
    documents: Sequence[int],
    budget: int,
    generations: int,
    rng: Random,
    report: Report = ignore,
) -> str:
    """The best scheme bred from these roots within so many losses, on all these documents."""
    limit, pool, order = losses.spent + budget, list(roots), list(documents)
    generations = max(1, min(generations, budget // cost(WORTHWHILE, len(order))))
    for generation in range(generations):
        share = (limit - losses.spent) // (generations - generation)
        known = sum(losses.complete(scheme, order) for scheme in pool)
        born = breed(pool, max(0, affordable(share, len(order), known) - len(pool)), generation)
        rng.shuffle(order)
        pool = halve(losses, [*pool, *born], order, report)[:SURVIVORS]
    return pool[0]


@dataclass(frozen=True)
class SearchResult:
    """`scheme` is the one to use: the winner, or the start where the gain is not significant.
    `gain` is the start's loss minus the winner's, on judged documents; None where one of them was
    refused there. `tried` counts schemes, the start included."""

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


def split_documents(documents: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The documents to search on and those to judge on."""
    if documents < MIN_DOCUMENTS:
        raise UserError(
            f"--search needs documents to search on and others to judge on, but got {documents}: "
            f"give at least {MIN_DOCUMENTS}."
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
) -> SearchResult:
    """The winner against its start, on held-out documents."""
    losses = Losses(score)
    before, after = losses.of(start, judged), losses.of(winner, judged)
    if math.inf in before or math.inf in after:
        gain, helps = None, math.inf not in after
    else:
        gain = paired(before, after)
        helps = gain.clear and gain.mean > 0
    scheme = winner if helps else start
    return SearchResult(scheme, start, winner, gain, tried, tuple(searched), tuple(judged))
