"""Per-dimension factors: they start at linear, NTK and YaRN, never fall, and reach a known best."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest
import torch

from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.extension.search import Losses, search_factors
from longitude.extension.search_space import (
    Curve,
    around_critical,
    critical_pairs,
    curve_of,
    factor_starts,
    own_curve,
)
from longitude.parts import LongRope, Rope

L, N, HEAD = 256, 2048, 32
DOCUMENTS = range(4)


def rope(text: str = "rope()") -> Rope:
    return parse(text).rotary


class Exam:
    """The loss is the distance of ln λ from a curve that is none of the starts."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise, self.seen = noise, dict[str, None]()
        self.readings = 0
        self.best = [math.log(8) / (1 + math.exp(4 - i)) for i in range(HEAD // 2)]

    def __call__(self, scheme, documents):
        self.seen[scheme] = None
        self.readings += len(documents)
        away = math.dist(curve_of(scheme).logs, self.best)
        return [away + d + Random(f"{scheme} {d}").gauss(0, self.noise) for d in documents]


def test_starts_turn_as_linear_ntk_and_yarn_do():
    own = rope("rope(base=500000, fraction=0.5)")
    found = factor_starts(own, 128, 4096, 32768)
    names = ["linear(8)", "ntk(8)", "yarn(8, original=4096)"]
    assert list(found.values())[:3] == [
        f"rope(base=500000, fraction=0.5, frequencies={name})" for name in names
    ]
    for text, name in found.items():
        written, named = parse(text).rotary.frequencies, parse(name).rotary.frequencies
        turns, expected = (f.inv_freq(64, 500000, 32768) for f in (written, named))
        torch.testing.assert_close(turns, expected, rtol=1e-4, atol=0)
        assert written.gain(32768) == pytest.approx(named.gain(32768), rel=1e-3)


def test_a_model_that_is_scaled_already_is_scaled_on_top():
    own = rope("rope(base=500000, frequencies=llama3(8, original=8192))")
    linear, *_ = factor_starts(own, 128, 131072, 262144)
    turns = parse(linear).rotary.frequencies.inv_freq(128, 500000, 262144)
    expected = own.frequencies.inv_freq(128, 500000, 131072) / 2
    torch.testing.assert_close(turns, expected, rtol=1e-4, atol=0)
    assert all(text == name for text, name in factor_starts(own, 128, 131072, 262144).items())


@pytest.mark.parametrize(
    ("head", "base", "trained", "ends", "found"),
    [(96, 10_000, 2048, (19, 31), 25), (128, 500_000, 8192, (24, 35), 30)],
    ids=["Phi-3-mini", "Llama-3-8B"],
)
def test_longrope2s_critical_pairs(head, base, trained, ends, found):
    """⌈(d/2) log_b(L/2π)⌉, and with L/10: the paper's numbers; the start lies where it ended."""
    own, pairs, ratio = rope(f"rope(base={base})"), head // 2, 16
    formula = [pairs * math.log(trained / turns / (2 * math.pi), base) for turns in (10, 1)]
    assert critical_pairs(own, head, trained) == ends == tuple(map(math.ceil, formula))
    *_, last = factor_starts(own, head, trained, ratio * trained)
    factors = parse(last).rotary.frequencies.long
    expected = [ratio ** min(1, i / found) for i in range(pairs)]
    assert factors == pytest.approx(expected, rel=1e-4)


def test_a_curve_in_longrope2s_form():
    """From the critical pair on [s, 2s] and rising; NTK's powers before it."""
    own, at, ratio = own_curve(rope(), HEAD, L), 6, 8.0
    rng = Random(5)
    wild = Curve(tuple(rng.uniform(0, 4) for _ in own.logs), 1.1)
    made = [math.exp(log) for log in around_critical(wild, own, at, ratio).logs]
    assert all(a <= b for a, b in pairwise(made))
    assert all(ratio - 1e-9 <= f <= 2 * ratio + 1e-9 for f in made[at:])
    assert made[:at] == pytest.approx([made[at] ** (i / at) for i in range(at)])
    base = 10_000 * made[at] ** (HEAD / 2 / at)  # which is another base
    theta = [10_000 ** (-2 * i / HEAD) / made[i] for i in range(at + 1)]
    assert theta == pytest.approx([base ** (-2 * i / HEAD) for i in range(at + 1)])


def test_half_of_the_children_have_longrope2s_form():
    exam = Exam()
    search_factors(exam, rope(), HEAD, L, N, DOCUMENTS, 160, Random(0))
    low, high = critical_pairs(rope(), HEAD, L)

    def in_form(text):
        logs = curve_of(text).logs
        return any(
            logs[at] >= math.log(7.999)
            and all(abs(logs[i] - logs[at] * i / at) < 1e-3 for i in range(at))
            for at in range(low, high + 1)
        )

    share = sum(map(in_form, exam.seen)) / len(exam.seen)
    assert 0.2 < share < 0.8


def test_pairs_that_do_not_turn_are_refused():
    with pytest.raises(UserError, match="never rotate"):
        factor_starts(rope("rope(frequencies=proportional(0.5))"), HEAD, L, N)


@pytest.mark.parametrize("seed", range(2))
def test_the_search_comes_closer_than_any_start_within_its_budget(seed):
    exam = Exam(noise=0.02)
    best = search_factors(exam, rope(), HEAD, L, N, DOCUMENTS, 250, Random(seed))
    starts = [math.dist(curve_of(s).logs, exam.best) for s in factor_starts(rope(), HEAD, L, N)]
    assert math.dist(curve_of(best).logs, exam.best) < 0.7 * min(starts)
    assert exam.readings <= 250


def test_every_scheme_tried_is_one_that_runtimes_serve():
    exam = Exam()
    search_factors(exam, rope(), HEAD, L, N, DOCUMENTS, 160, Random(0))
    assert len(exam.seen) > 40
    for text in exam.seen:
        assert dump(parse(text)) == text
        factors = parse(text).rotary.frequencies
        assert isinstance(factors, LongRope) and factors.short == factors.long
        assert (factors.original, factors.factor) == (L, 8)
        assert all(a <= b for a, b in pairwise(factors.long))
        assert factors.long[0] >= 1 and factors.long[-1] <= 16
        assert all(round(f, 4) == f for f in (*factors.long, factors.attention()))


def test_the_same_seed_tries_the_same():
    exams = Exam(), Exam(), Exam()
    for exam, seed in zip(exams, (3, 3, 4), strict=True):
        search_factors(exam, rope(), HEAD, L, N, DOCUMENTS, 100, Random(seed))
    assert list(exams[0].seen) == list(exams[1].seen) != list(exams[2].seen)


def test_where_nothing_is_better_a_start_wins():
    readings = Losses(lambda scheme, documents: [float(scheme != ntk)] * len(documents))
    _, ntk, *_ = factor_starts(rope(), HEAD, L, N)
    assert search_factors(readings, rope(), HEAD, L, N, DOCUMENTS, 100, Random(0)) == ntk
