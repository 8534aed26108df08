"""Intervals against closed forms, published tables, and their coverage in simulations."""

import math
import random
from itertools import product

import pytest

from longitude.eval.stats import (
    BOOTSTRAP_FROM,
    Interval,
    bootstrap,
    matched,
    over_documents,
    paired,
    share,
    student,
    t_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("freedom", "bound"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (10, 2.228), (30, 2.042)],
)
def test_students_bounds_are_those_of_the_tables(freedom: int, bound: float) -> None:
    assert t_quantile(freedom) == pytest.approx(bound, abs=5e-4)


@pytest.mark.parametrize("freedom", [1, 4, 9])
def test_students_bounds_hold_95_percent_of_its_density(freedom: int) -> None:
    log_c = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    c = math.exp(log_c) / math.sqrt(freedom * math.pi)
    steps, bound = 20_000, t_quantile(freedom)
    width = 2 * bound / steps
    middles = (-bound + (i + 0.5) * width for i in range(steps))
    inside = sum((1 + t * t / freedom) ** (-(freedom + 1) / 2) for t in middles) * width * c
    assert inside == pytest.approx(0.95, abs=1e-6)


def test_wilsons_bounds_solve_its_equation_and_equal_a_published_example() -> None:
    # Newcombe 1998 (Statistics in Medicine 17), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29
    published = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605)}
    published |= {(0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (right, asked), bounds in published.items():
        assert wilson(right, asked) == pytest.approx(bounds, abs=1e-4)
    for right in range(1, 12):
        for p in wilson(right, 12):
            z = abs(right / 12 - p) / math.sqrt(p * (1 - p) / 12) if p < 1 else 1.96
            assert z == pytest.approx(1.96, abs=1e-3)
    assert wilson(12, 12)[1] == 1.0
    assert wilson(0, 12)[0] == 0.0
    assert wilson(0, 0) == (0.0, 1.0)


def test_students_interval_by_hand() -> None:
    half = 4.302653 * 1.0 / math.sqrt(3)  # 1, 2, 3: mean 2, standard deviation 1
    assert student([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2 + half))


def test_one_document_is_its_own_interval_and_tells_nothing_apart() -> None:
    assert over_documents([2.5]) == Interval(2.5, 2.5, 2.5, 1)
    assert bootstrap([2.5]) == (2.5, 2.5)
    assert not over_documents([2.5]).clear
    assert not paired([9.0], [1.0]).clear
    assert not matched([1.0], [0.0]).clear


def test_the_bootstrap_is_reproducible_shared_between_methods_and_inside_the_data() -> None:
    rng = random.Random(3)
    values = [rng.gauss(5, 2) for _ in range(20)]
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values)
    assert bootstrap(values, seed=1) != (low, high)
    assert bootstrap([v + 1 for v in values]) == pytest.approx((low + 1, high + 1))
    assert min(values) < low < sum(values) / 20 < high < max(values)


def test_a_pair_differs_where_two_means_overlap() -> None:
    rng = random.Random(5)
    hard = [rng.gauss(3, 1) for _ in range(10)]
    harder = [v + 0.1 + rng.gauss(0, 0.02) for v in hard]
    one, other = over_documents(hard), over_documents(harder)
    assert one.high > other.low  # apart they can't be told from each other
    gap = paired(harder, hard)
    assert gap.clear and gap.low < 0.1 < gap.high
    assert gap.mean == pytest.approx(other.mean - one.mean)
    same = [0.0] * 10
    assert not paired(same, same).clear


def test_all_right_is_not_taken_for_certainty() -> None:
    told = share([1.0] * 5)
    assert (told.mean, told.high, told.n) == (1.0, 1.0, 5)
    assert told.low == pytest.approx(0.5655, abs=1e-4)
    alike = matched([1.0] * 5, [1.0] * 5)
    assert alike.mean == 0 and alike.low < 0 < alike.high
    assert not matched([1.0, 1.0], [0.0, 0.0]).clear
    assert matched([1.0] * 10, [0.0] * 10).clear
    assert matched([0.0] * 10, [1.0] * 10).high < 0


def test_matched_is_agresti_and_mins_formula_and_holds_the_observed_difference() -> None:
    for yes, no, same in product(range(5), range(5), range(5)):
        n = yes + no + same
        if not n:
            continue
        found = matched(
            [1.0] * yes + [0.0] * no + [1.0] * same, [0.0] * yes + [1.0] * no + [1.0] * same
        )
        p12, p21 = (yes + 0.5) / (n + 2), (no + 0.5) / (n + 2)
        half = 1.959964 * math.sqrt(((p12 + p21) - (p12 - p21) ** 2) / (n + 2))
        assert found.low == pytest.approx(max(-1, p12 - p21 - half), abs=1e-6)
        assert found.high == pytest.approx(min(1, p12 - p21 + half), abs=1e-6)
        assert found.low <= found.mean <= found.high
        assert found.mean == pytest.approx((yes - no) / n)


@pytest.mark.parametrize("n", [3, BOOTSTRAP_FROM - 1, BOOTSTRAP_FROM, 12])
def test_means_are_covered_as_often_as_they_should(n: int) -> None:
    rng, trials = random.Random(n), 400
    drawn = ([rng.gauss(1, 3) for _ in range(n)] for _ in range(trials))
    covered = sum((found := over_documents(d)).low <= 1 <= found.high for d in drawn)
    assert 0.91 <= covered / trials <= 0.985  # 95 % give or take three standard errors


def test_plain_percentiles_would_cover_too_little() -> None:
    rng, trials, n, covered = random.Random(0), 300, 4, 0
    for _ in range(trials):
        drawn = [rng.gauss(0, 1) for _ in range(n)]
        means = sorted(sum(rng.choices(drawn, k=n)) / n for _ in range(400))
        covered += means[10] <= 0 <= means[-11]
    assert covered / trials < 0.88  # which is why few documents have Student's interval


@pytest.mark.parametrize("p", [0.5, 0.9])
def test_shares_and_their_differences_are_covered(p: float) -> None:
    rng, trials, shares, gaps = random.Random(1), 400, 0, 0
    for _ in range(trials):
        a, b = ([float(rng.random() < q) for _ in range(15)] for q in (p, p - 0.3))
        one, gap = share(a), matched(a, b)
        shares += one.low <= p <= one.high
        gaps += gap.low <= 0.3 <= gap.high
    assert 0.91 <= shares / trials <= 0.99
    assert 0.91 <= gaps / trials <= 0.99


def test_pairs_need_as_many() -> None:
    with pytest.raises(AssertionError, match="one number of each"):
        paired([1.0, 2.0], [1.0])
