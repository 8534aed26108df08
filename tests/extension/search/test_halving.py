"""Halving finds the best of many with few readings, whatever documents add and schemes refuse."""

from __future__ import annotations

import math
from random import Random

import pytest

from longitude.extension.search import Losses, affordable, cost, evolve, halve, schedule


class Exam:
    """Scheme "17" has the loss (17 - 40)² / 1000, plus what a document adds to all, plus noise."""

    def __init__(self, noise: float = 0.0, refused: frozenset[str] = frozenset()) -> None:
        self.noise, self.refused = noise, refused
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, scheme, documents):
        self.calls.append((scheme, tuple(documents)))
        return [self.loss(scheme, one) for one in documents]

    def loss(self, scheme: str, document: int) -> float:
        if scheme in self.refused:
            return math.inf
        noise = Random(f"{scheme} {document}").gauss(0, self.noise)
        return (int(scheme) - 40) ** 2 / 1000 + 5 * document + noise

    @property
    def readings(self) -> list[tuple[str, int]]:
        return [(scheme, one) for scheme, documents in self.calls for one in documents]


MANY = [str(n) for n in range(64)]
DOCUMENTS = [7, 3, 12, 5, 1, 9, 2, 20]


def test_documents_double_while_schemes_halve():
    assert schedule(32, 8) == [(32, 1), (16, 2), (8, 4), (4, 8)]
    assert schedule(8, 5) == [(8, 1), (4, 2), (2, 4), (2, 5)]
    assert schedule(1, 2) == [(1, 1), (1, 2)]


def test_cost_is_what_is_read():
    for many, documents in [(64, 8), (13, 8), (5, 3), (2, 1), (1, 8)]:
        exam = Exam()
        halve(Losses(exam), MANY[:many], DOCUMENTS[:documents])
        assert len(exam.readings) == len(set(exam.readings)) == cost(many, documents)


def test_what_is_known_costs_nothing():
    """At most, and exactly so where the new schemes are the better ones."""
    for new, documents in [(30, 8), (9, 8), (3, 4), (1, 2)]:
        exam, known = Exam(), ["400", "500", "600"]
        readings = Losses(exam)
        halve(readings, known, DOCUMENTS[:documents])
        for scheme in known:
            readings.of(scheme, DOCUMENTS[:documents])
        before = readings.spent
        halve(readings, [*known, *MANY[:new]], DOCUMENTS[:documents])
        assert readings.spent - before == cost(new + 3, documents, known=3)
        assert affordable(readings.spent - before, documents, known=3) >= new + 3


@pytest.mark.parametrize("budget", [0, 9, 31, 100, 1000])
def test_affordable_is_the_most_that_the_budget_holds(budget):
    most = affordable(budget, 8)
    assert cost(most, 8) <= budget < cost(most + 1, 8)


def test_the_best_is_found_although_documents_differ_more_than_schemes():
    assert halve(Losses(Exam()), MANY, DOCUMENTS)[0] == "40"


def test_noise_by_document_is_averaged_away():
    """Single documents would pick wrongly; of 20 halvings most end near the best."""
    near = 0
    for seed in range(20):
        schemes = Random(seed).sample(MANY, 64)
        documents = Random(seed).sample(range(1000), 16)
        found = halve(Losses(Exam(noise=0.05)), schemes, documents)[0]
        near += abs(int(found) - 40) <= 8
    assert near >= 17


def test_refused_schemes_are_asked_once_and_never_win():
    exam = Exam(refused=frozenset(map(str, range(20, 64))))
    assert halve(Losses(exam), MANY, DOCUMENTS)[0] == "19"
    asked = [scheme for scheme, _ in exam.readings]
    assert max(asked.count(scheme) for scheme in exam.refused) == 1
    every = Exam(refused=frozenset(MANY))
    assert halve(Losses(every), MANY, DOCUMENTS)[0] == "0"


def test_a_loss_that_is_no_number_counts_as_refused():
    readings = Losses(lambda scheme, documents: [math.nan] * len(documents))
    assert readings.mean("1", [1, 2]) == math.inf


def test_a_score_that_answers_for_fewer_documents_is_an_error():
    with pytest.raises(ValueError):
        Losses(lambda scheme, documents: [0.0]).of("1", [1, 2])


def near(rng: Random):
    def breed(parents, count, generation):
        reach = 32 >> generation
        return [str(int(rng.choice(parents)) + rng.randint(-reach, reach)) for _ in range(count)]

    return breed


def run(exam: Exam, budget: int, seed: int = 0) -> str:
    rng = Random(seed)
    return evolve(Losses(exam), ["0"], near(rng), DOCUMENTS, budget, 4, rng)


@pytest.mark.parametrize("seed", range(5))
def test_evolution_climbs_from_far_away_within_its_budget(seed):
    exam = Exam()
    assert abs(int(run(exam, 300, seed)) - 40) <= 2
    assert len(exam.readings) == len(set(exam.readings)) <= 300
    assert {one for _, one in exam.readings} == set(DOCUMENTS)


def test_the_same_seed_asks_the_same_in_the_same_order():
    exams = Exam(), Exam(), Exam()
    for exam, seed in zip(exams, (1, 1, 2), strict=True):
        run(exam, 200, seed)
    assert exams[0].calls == exams[1].calls != exams[2].calls


def test_the_winner_was_read_on_every_document():
    exam = Exam(noise=0.1)
    best = run(exam, 120)
    assert {one for scheme, one in exam.readings if scheme == best} == set(DOCUMENTS)


def test_a_budget_for_nothing_returns_the_root():
    assert run(Exam(), 0) == "0"


def test_news_tells_each_round():
    told = []
    halve(Losses(Exam()), MANY[:8], DOCUMENTS[:4], lambda *news: told.append(news))
    assert told == [
        (1, 3, "8 schemes on 1 document"),
        (2, 3, "4 schemes on 2 documents"),
        (3, 3, "2 schemes on 4 documents"),
    ]
