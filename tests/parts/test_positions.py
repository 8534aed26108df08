"""Positions: what training draws and what testing uses."""

import math

import pytest
import torch

from longitude import UserError
from longitude.parts import (
    Cream,
    E2Llm,
    EqualMean,
    Pose,
    RandomFloat,
    Randomized,
    RandomSteps,
    Sequential,
)


def draws(part, n: int, times: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [part.ids(n, rng=rng) for _ in range(times)]


def test_sequential_is_a_range_always():
    assert Sequential().ids(7) == Sequential().ids(7, rng=torch.Generator()) == range(7)


def test_randomized_is_sorted_and_without_replacement():
    for ids in draws(Randomized(50), 12, 200):
        assert ids.dtype == torch.int64 and ids.shape == (12,)
        assert int(ids.min()) >= 0 and int(ids.max()) < 50
        assert bool((ids.diff() > 0).all())


def test_randomized_draws_every_position_alike():
    """Each of 20 positions in a quarter of 4000 draws of 5, to five standard deviations."""
    counts = torch.cat(draws(Randomized(20), 5, 4000)).bincount(minlength=20)
    spread = math.sqrt(4000 * 0.25 * 0.75)
    assert float((counts - 1000).abs().max()) < 5 * spread


def test_randomized_draw_is_one_for_queries_and_keys():
    """A draw is a function of its generator, so one draw can serve both sides."""
    a, b = (Randomized(2048).ids(40, rng=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, Randomized(2048).ids(40, rng=torch.Generator().manual_seed(4)))


def test_randomized_full_draw_is_every_position():
    assert draws(Randomized(9), 9, 1)[0].tolist() == list(range(9))


@pytest.mark.parametrize(("n", "top"), [(1, 5), (4, 16), (7, 50), (50, 50), (3, 10)])
def test_randomized_tests_on_evenly_spaced_points(n, top):
    """⌊t·max/n⌋, the points of [0, max) spaced as evenly as whole numbers allow."""
    ids = Randomized(top).ids(n)
    assert ids.tolist() == [t * top // n for t in range(n)]
    gaps = ids.diff()
    assert n == 1 or int(gaps.max() - gaps.min()) <= 1


def test_randomized_has_no_room_for_more():
    with pytest.raises(UserError, match="at least 51"):
        Randomized(50).ids(51)


def test_equal_mean_places_tokens_evenly():
    for part in (EqualMean(64), EqualMean(64, "beta", 512)):
        for ids in draws(part, 9, 20):
            assert ids.dtype == torch.float64 and float(ids[0]) == 0
            even = torch.arange(9, dtype=torch.float64) / 8 * ids[-1]
            torch.testing.assert_close(ids, even, rtol=1e-14, atol=1e-12)
        assert part.ids(9) == range(9)


def test_equal_mean_ends_are_exponential():
    """Kolmogorov-Smirnov distance of 4000 ends to 1 - exp(-x/64), below its 0.1% bound."""
    ends = torch.stack(draws(EqualMean(64), 5, 4000))[:, -1].sort().values
    law = 1 - (-ends / 64).exp()
    steps = torch.arange(1, 4001, dtype=torch.float64) / 4000
    assert float((law - steps).abs().max()) < 1.95 / math.sqrt(4000)


def test_equal_mean_beta_stays_below_max_with_the_same_mean():
    ends = torch.stack(draws(EqualMean(64, "beta", 512), 5, 4000))[:, -1]
    assert float(ends.max()) <= 512 and float(ends.min()) >= 0
    assert float(ends.mean()) == pytest.approx(64, abs=5 * float(ends.std()) / math.sqrt(4000))


def test_equal_mean_beta_needs_a_larger_max():
    for top in (None, 64, 10):
        with pytest.raises(UserError, match="max above mean=64"):
            EqualMean(64, "beta", top)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_pose_moves_whole_chunks_apart(chunks):
    """Ids rise, inside a chunk by one; the skips never shrink; the last id stays below target."""
    for ids in draws(Pose(64, chunks), 16, 300):
        skips = ids - torch.arange(16)
        assert int(skips[0]) == 0 and bool((skips.diff() >= 0).all())
        assert len(skips.unique()) <= chunks and int(ids[-1]) < 64
    assert Pose(64, chunks).ids(16) == range(16)


def test_pose_covers_every_distance_of_the_target():
    seen = set()
    for ids in draws(Pose(24), 8, 2000):
        seen |= set((ids[:, None] - ids[None]).flatten().tolist())
    assert seen == set(range(-23, 24))


def test_pose_without_room_stays_put():
    assert draws(Pose(16), 16, 1)[0].tolist() == list(range(16))
    for n in (17, 1):
        with pytest.raises(UserError, match="2 to 16 tokens"):
            Pose(16).ids(n, rng=torch.Generator())


def test_e2_llm_divides_by_a_factor_what_an_offset_moved():
    """(m + t) / g for one whole g ≤ G and 0 ≤ t ≤ g L - n, the first four tokens m / g."""
    window, n, most = 32, 24, 5
    factors, offsets = set(), set()
    for ids in draws(E2Llm(window, max_factor=most), n, 600):
        g = round(1 / float(ids[1] - ids[0]))
        t = round(float(ids[4]) * g) - 4
        expected = [m / g if m <= 3 else (m + t) / g for m in range(n)]
        assert ids.tolist() == pytest.approx(expected, rel=1e-13)
        assert 0 <= t <= g * window - n and float(ids[-1]) < window
        factors.add(g)
        offsets.add((g, t))
    assert factors == {1, 2, 3, 4, 5}
    assert {t for g, t in offsets if g == 1} == set(range(window - n + 1))


def test_e2_llm_reads_a_longer_text_by_interpolation():
    part = E2Llm(16)
    assert part.ids(16) == range(16)
    assert part.ids(64).tolist() == [m / 4 for m in range(64)]
    assert E2Llm(16, scale=4).ids(16).tolist() == [4 * m for m in range(16)]
    with pytest.raises(UserError, match="17 tokens do not fit into a window of 16"):
        part.ids(17, rng=torch.Generator())


def test_cream_has_a_head_a_middle_and_a_tail():
    """head = tail = n/3 or 4 s; the middle, in a row, ends between the bounds of some α ≤ s."""
    n, s = 150, 8
    heads, ends = set(), []
    for ids in draws(Cream(n * s), n, 800):
        cuts = [0, *((ids.diff() != 1).nonzero()[:, 0] + 1).tolist(), n]
        head, tail = cuts[1] if len(cuts) > 2 else n, n - cuts[-2]
        assert ids[0] == 0 and ids[-1] == n * s - 1 and bool((ids.diff() > 0).all())
        if len(cuts) == 4:  # neither gap is closed
            assert head == tail and head in (n // 3, 4 * s)
            heads.add(head)
            middle, end = n - 2 * head, int(ids[n - tail - 1])
            assert head + middle - 1 <= end <= s * n - tail - 1
            ends.append(end / n)
    assert heads == {n // 3, 4 * s}
    assert 0.35 * s < sum(ends) / len(ends) < 0.65 * s  # the middle of the target is the middle's
    assert Cream(1200).ids(9) == range(9)
    assert draws(Cream(30), 30, 1)[0].tolist() == [*range(30)]
    with pytest.raises(UserError, match="train on 3 to 30 tokens"):
        Cream(30).ids(31, rng=torch.Generator())


def test_random_floats_are_sorted_uniform_numbers_and_read_evenly():
    drawn = torch.stack(draws(RandomFloat(64), 16, 2000))
    assert bool((drawn.diff(dim=1) >= 0).all())
    assert 0 <= float(drawn.min()) and float(drawn.max()) < 64
    expected = [64 * (i + 1) / 17 for i in range(16)]  # means of uniform order statistics
    assert drawn.mean(0).tolist() == pytest.approx(expected, abs=1)
    for n in (16, 64, 256):
        got = RandomFloat(64).ids(n).tolist()
        assert got == pytest.approx([64 * (2 * i - 1) / (2 * max(64, n)) for i in range(1, n + 1)])


def test_random_steps_are_one_on_average_and_end_within_max():
    drawn = torch.stack(draws(RandomSteps(1000), 40, 3000))
    steps = drawn.diff(dim=1)
    assert 0 <= float(steps.min()) and float(steps.max()) < 2
    assert float(steps.mean()) == pytest.approx(1, abs=0.02)
    assert max(float(ids[-1]) for ids in draws(RandomSteps(40), 40, 200)) == pytest.approx(40)
    assert RandomSteps(40).ids(40) == range(40)
