"""Remaps: the distance that each pair is turned by, against the papers' maps."""

import math

import pytest
import torch

from longitude import parse
from longitude.parts import (
    DimensionWise,
    DualChunk,
    InverseLeaky,
    LeakyRerope,
    LmInfinite,
    Rerope,
    SelfExtend,
    Streaming,
    String,
)

N = 61
i, j = torch.arange(N)[:, None], torch.arange(N)[None, :]

COVERING = [
    Rerope(1),
    Rerope(7),
    LeakyRerope(7, 3),
    LeakyRerope(1, 16),
    LeakyRerope(5, 0.5),
    InverseLeaky(6, 16),
    SelfExtend(4, 8),
    SelfExtend(3, 8),
    SelfExtend(1, 5),
    DimensionWise((4, 1, 7), 8, exact=(2,)),
    DualChunk(12, 2),
    DualChunk(3, 1),
    DualChunk(24, 4),
    String(20, 3),
    String(2, 1),
]
HIDING = [Streaming(3, 9), Streaming(12, 4), LmInfinite(7, 2), LmInfinite(3, 20)]


def believed(remap) -> torch.Tensor:
    """The distance each pair is turned by, q(i) - k(j) of its one region; NaN in none."""
    out = torch.full((N, N), math.nan, dtype=torch.float64)
    for region in remap.regions():
        distance = (region.q(i) - region.k(j)).expand(N, N)
        out = torch.where(region.where.visible(i, j), distance, out)
    return out


def by_pair(f) -> torch.Tensor:
    """A paper's map over the plane, from f(m, n) for a query at m and a key at n <= m; a key ahead
    is as far as the mirrored pair, the other way."""
    cells = [[f(m, n) if m >= n else -f(n, m) for n in range(N)] for m in range(N)]
    return torch.tensor(cells, dtype=torch.float64)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("remap", COVERING + HIDING, ids=str)
def test_regions_are_disjoint(remap):
    times = sum(r.where.visible(i, j).int() for r in remap.regions())
    assert int(times.max()) == 1


@pytest.mark.parametrize("remap", COVERING, ids=str)
def test_regions_cover_the_plane_for_both_signs(remap):
    times = sum(r.where.visible(i, j).int() for r in remap.regions())
    assert int(times.min()) == 1


@pytest.mark.parametrize("remap", COVERING + HIDING, ids=str)
def test_the_map_is_odd(remap):
    """A key ahead stands as far as the same key would behind, with the other sign."""
    got = believed(remap)
    both = ~(got.isnan() | got.T.isnan())
    assert both.any()
    torch.testing.assert_close(got[both], -got.T[both], rtol=0, atol=1e-12)


@pytest.mark.parametrize("w", [1, 2, 7, 50, 100])
def test_rerope_is_min_of_distance_and_window(w):
    same(believed(Rerope(w)), by_pair(lambda m, n: min(m - n, w)))


@pytest.mark.parametrize(("w", "k"), [(7, 3.0), (1, 16.0), (20, 8), (9, 1)])
def test_leaky_rerope_grows_k_times_slower_past_the_window(w, k):
    def leaky(m, n):
        r = m - n
        return r if r < w else w + (r - w) / k

    same(believed(LeakyRerope(w, k)), by_pair(leaky))


def test_leaky_rerope_between_its_limits():
    """Factor 1 is plain RoPE, a large one ReRoPE."""
    same(believed(LeakyRerope(7, 1)), by_pair(lambda m, n: m - n))
    near = believed(LeakyRerope(7, 1e13)) - believed(Rerope(7))
    assert float(near.abs().max()) < 1e-11


@pytest.mark.parametrize(("w", "step"), [(6, 16), (12, 8.0)])
def test_inverse_leaky_grows_step_times_faster(w, step):
    def inverse(m, n):
        r = m - n
        return r if r < w else w + step * (r - w)

    same(believed(InverseLeaky(w, step)), by_pair(inverse))


@pytest.mark.parametrize(("g", "w"), [(4, 8), (2, 6), (8, 16), (3, 8), (5, 7), (1, 4)])
def test_self_extend_floors_query_and_key_apart(g, w):
    """The paper's listing: neighbours exact, groups ⌊m/G⌋ + W - ⌊W/G⌋ - ⌊n/G⌋."""

    def extended(m, n):
        return m - n if m - n < w else m // g + w - w // g - n // g

    same(believed(SelfExtend(g, w)), by_pair(extended))


def test_self_extend_reaches_what_the_paper_says():
    """(L - W)·G + W positions stay within distances below L."""
    trained, g, w = 16, 4, 8
    reach = (trained - w) * g + w
    assert reach <= N
    got = believed(SelfExtend(g, w))[:reach, :reach]
    assert float(got.max()) == trained - 1


@pytest.mark.parametrize(("c", "local"), [(12, 2), (3, 1), (24, 4), (15, 7)])
def test_dual_chunk_turns_queries_by_how_many_chunks_back_the_key_lies(c, local):
    """The authors' code: keys at n mod s; queries at m mod s, min(m mod s + s, c), or c."""
    s = c - local

    def chunked(m, n):
        back = m // s - n // s
        query = [m % s, min(m % s + s, c)][back] if back < 2 else c
        return query - n % s

    got = believed(DualChunk(c, local))
    same(got, by_pair(chunked))
    causal = got[i >= j]
    assert float(causal.min()) == 0 and float(causal.max()) <= c
    distance = (i - j)[(i >= j) & (i - j <= local + 1)].double()
    assert torch.equal(got[(i >= j) & (i - j <= local + 1)], distance)


@pytest.mark.parametrize(("shift", "local"), [(20, 3), (2, 1), (33, 32), (99, 4)])
def test_string_starts_again_from_local(shift, local):
    """The authors' decoding: r below S, r - S + W from there on; W of S comes back."""

    def shifted(m, n):
        return m - n if m - n < shift else m - n - shift + local

    got = believed(String(shift, local))
    same(got, by_pair(shifted))
    if shift < N:
        assert got[shift, 0] == local and got[shift - 1, 0] == shift - 1
        assert float(got[-1].max()) == max(shift - 1, N - 1 - shift + local)


def test_string_as_released_has_scores_1_1434_times_as_large():
    assert 1 / parse("string_released()").scale[0].t == pytest.approx(1.143434, abs=1e-6)
    assert parse("string_llama()").rotary == parse("string_released()").rotary


@pytest.mark.parametrize(("sinks", "window"), [(3, 9), (4, 20), (1, 1), (12, 4)])
def test_streaming_is_the_index_inside_a_real_cache(sinks, window):
    """A list of kept tokens, evicted as the authors' cache does it, numbered by place."""
    expected = torch.full((N, N), math.nan, dtype=torch.float64)
    cache: list[int] = []
    for token in range(N):
        cache.append(token)
        if len(cache) > sinks + window:
            del cache[sinks]  # the oldest token that is no sink
        for place, kept in enumerate(cache):
            expected[token, kept] = len(cache) - 1 - place
    causal = believed(Streaming(sinks, window)).masked_fill(i < j, math.nan)
    same(causal, expected)


@pytest.mark.parametrize(("w", "first"), [(7, 2), (3, 20), (20, 10)])
def test_lm_infinite_sees_a_window_and_the_first_tokens_at_its_edge(w, first):
    def lambda_shaped(m, n):
        r = m - n
        return r if r < w else w if n < first else math.nan

    causal = torch.where(i >= j, by_pair(lambda_shaped), math.nan)
    same(believed(LmInfinite(w, first)).masked_fill(i < j, math.nan), causal)
