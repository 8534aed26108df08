"""The whole search: better parameters for each leading scheme, and factors for each dimension.

Nothing here knows a model: schemes are texts, documents are numbers, and every loss comes from
`score`, whose caller records what it is asked and answers from the record when a killed search is
run again. The same seed asks the same questions in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from longitude.core.scheme import Scheme
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.extension.search.factors import STARTS, factor_starts, scalable, search_factors
from longitude.extension.search.halving import (
    SMALLEST,
    Found,
    News,
    Readings,
    Score,
    apart,
    cost,
    evolve,
    judge,
    quiet,
)
from longitude.extension.search.space import neighbours, starts
from longitude.parts import Rope

GENERATIONS = 3


def search(
    score: Score,
    leaders: Sequence[str],
    trained: int,
    target: int,
    head_dim: int,
    documents: int,
    budget: int,
    seed: int = 0,
    news: News = quiet,
    *,
    own: str | None = None,
) -> list[Found]:
    """One result for each leader that can vary, and one for per-dimension factors where the model's
    own scheme is given and is one rotation. The budget counts readings (a scheme on a document) of
    the search, shared evenly; judging adds two of each judged document for each result, at most."""
    roots, rope = starts(leaders, trained, target), _rotation(own, head_dim, trained)
    searched, judged = apart(documents, seed)
    ways = len(roots) + (rope is not None)
    if budget < least(ways, documents):
        raise UserError(
            f"--search has {ways} ways to go on and needs {least(ways, documents)} readings for "
            f"them, but may make {budget}: allow more, or give fewer methods or documents."
        )
    task = _Task(score, trained, target, searched, judged, budget // max(1, ways), seed, news)
    found = [task.parameters(root) for root in roots]
    return [*found, task.factors(rope, head_dim)] if rope else found


def least(ways: int, documents: int) -> int:
    """The smallest budget, in readings, with which so many ways can be searched."""
    searched = documents // 2
    return ways * (STARTS * searched + cost(SMALLEST, searched))


@dataclass(frozen=True)
class _Task:
    """What the ways of one search have in common."""

    score: Score
    trained: int
    target: int
    searched: tuple[int, ...]
    judged: tuple[int, ...]
    share: int
    seed: int
    news: News

    def parameters(self, root: str) -> Found:
        """Better parameters for one scheme."""
        readings, rng = Readings(self.score), Random(f"{self.seed} {root}")

        def breed(parents: Sequence[str], count: int, generation: int) -> list[str]:
            each = -(-count // len(parents))
            bred = [neighbours(p, self.trained, self.target, rng, each) for p in parents]
            return [child for litter in bred for child in litter][:count]

        winner = evolve(
            readings, [root], breed, self.searched, self.share, GENERATIONS, rng, self._about(root)
        )
        return self._judged(readings, root, winner)

    def factors(self, rope: Rope, head_dim: int) -> Found:
        """Factors for each dimension, against the best of linear, NTK and YaRN."""
        readings, rng = Readings(self.score), Random(f"{self.seed} factors")
        lengths = self.trained, self.target
        winner = search_factors(
            readings,
            rope,
            head_dim,
            *lengths,
            self.searched,
            self.share,
            rng,
            self._about("factors"),
        )
        names = factor_starts(rope, head_dim, *lengths)
        root = min(names, key=lambda text: readings.mean(text, self.searched))
        return self._judged(readings, names[root], names.get(winner, winner))

    def _judged(self, readings: Readings, start: str, winner: str) -> Found:
        return judge(self.score, start, winner, readings.tried, self.searched, self.judged)

    def _about(self, what: str) -> News:
        return lambda round, of, text: self.news(round, of, f"{what}: {text}")


def _rotation(own: str | None, head_dim: int, trained: int) -> Rope | None:
    """The rotation that all layers of a model share, if there is one that factors can scale."""
    scheme = None if own is None else parse(own)
    rope = scheme.rotary if isinstance(scheme, Scheme) else None
    return rope if rope and scalable(rope, head_dim, trained) else None
