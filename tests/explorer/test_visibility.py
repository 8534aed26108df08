"""What the last token sees, against a look at every token, and against a real cache."""

from __future__ import annotations

import math

import pytest
import torch

from longitude import Scheme, parse
from longitude.cache import Cache
from longitude.explorer.data import DROPPED, HIDDEN, KNOWN, PAST, bound, keys

TEXTS = [
    "rope()",
    "rope() + window(20)",
    "rope() + window(20, sinks=3)",
    "rope() + chunked(16)",
    "rope(remap=streaming(4, 30))",
    "rope(remap=lm_infinite(25, 3))",
    "rope(remap=self_extend(4, 16))",
    "rope(remap=dual_chunk(24, 8))",
    "rope(remap=leaky_rerope(16, 4))",
    "randomized(4000) + rope()",
    "alibi()",
    "bidirectional()",
    "learned(60)",
]


def scheme(text: str) -> Scheme:
    found = parse(text)
    assert isinstance(found, Scheme)
    return found


def looked_at(s: Scheme, most: float, n: int) -> list[str]:
    """The state of each token by the definitions."""
    pos = [float(p) for p in s.positions.ids(n)]
    at = torch.tensor(pos, dtype=torch.float64)
    later = torch.arange(pos[-1], pos[-1] + 100, dtype=torch.float64)[:, None]
    sees = torch.stack([area.visible(later, at) for area in s.areas()]).any(0)
    told = [abs(pos[-1] - j) for j in pos] if not s.embed else pos
    for region in s.rotary.remap.regions() if s.rotary and s.rotary.remap else ():
        inside = region.where.visible(at[-1], at).tolist()
        away = (region.q(at[-1]) - region.k(at)).abs().tolist()
        told = [a if here else t for here, a, t in zip(inside, away, told, strict=True)]
    kept, seen = sees.any(0).tolist(), sees[0].tolist()
    known = [PAST if t > most else KNOWN for t in told]
    return [
        k if shown else HIDDEN if held else DROPPED
        for k, shown, held in zip(known, seen, kept, strict=True)
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_runs_are_what_a_look_at_every_token_finds(text: str) -> None:
    n, s, most = 400, scheme(text), 59.0
    found = keys(s, most, n)
    drawn = [run.state for run in found.runs for _ in range(run.first, run.last + 1)]
    assert drawn == looked_at(s, most, n)
    assert found.runs[0].first == 0 and found.runs[-1].last == n - 1
    assert found.kept == sum(state != DROPPED for state in drawn)
    past = [t if s.embed else n - 1 - t for t, state in enumerate(drawn) if state == PAST]
    assert found.reach == (min(past) - 1 if past else None)


@pytest.mark.parametrize("text", ["rope() + window(20, sinks=3)", "rope(remap=streaming(4, 30))"])
def test_a_cache_keeps_what_is_said(text: str) -> None:
    n, s = 300, scheme(text)
    cache = Cache(s, slack=0)
    for t in range(n):
        k = torch.zeros(1, 1, 1, 8)
        cache.add(k, k, range(t, t + 1))
    # what was kept for the token before the last is still there until the next one comes
    assert keys(s, math.inf, n).kept <= len(cache) <= keys(s, math.inf, n).kept + 1


def test_far_runs_are_found_exactly() -> None:
    found = keys(scheme("rope() + window(12345, sinks=3)"), 9999, 10_000_000)
    assert [(r.first, r.last, r.state) for r in found.runs] == [
        (0, 2, PAST),
        (3, 10_000_000 - 12345 - 1, DROPPED),
        (10_000_000 - 12345, 10_000_000 - 10_001, PAST),
        (10_000_000 - 10_000, 9_999_999, KNOWN),
    ]
    assert found.kept == 12345 + 3 and found.reach == 9999


def test_slow_pairs_bound_what_is_known() -> None:
    window, dim, own = 4096, 64, scheme("rope()")
    assert bound(own, own, window, 16384, dim) == window
    assert bound(scheme("rope(frequencies=linear(4))"), own, window, 16384, dim) == (
        pytest.approx(4 * window)
    )
    ntk = (
        [10000 ** (-2 * i / dim) for i in range(32)],
        [(10000 * 4 ** (64 / 62)) ** (-2 * i / dim) for i in range(32)],
    )
    least = min(window * a / b for a, b in zip(*ntk, strict=True) if a * window < 2 * math.pi)
    found = bound(scheme("rope(frequencies=ntk(4))"), own, window, 16384, dim)
    assert found == pytest.approx(least)
    assert window < found < 4 * window  # which is why NTK is given a larger factor than it needs


def test_fast_pairs_know_the_whole_circle() -> None:
    assert bound(scheme("rope(base=2)"), scheme("rope(base=2)"), 4096, 16384, 64) == math.inf


def test_biases_and_tables_have_bounds_of_their_own() -> None:
    alibi = scheme("alibi()")
    assert bound(alibi, alibi, 512, 2048, 64) == 512
    assert bound(scheme("alibi_interpolated(4)"), alibi, 512, 2048, 64) == pytest.approx(2048)
    assert bound(scheme("ntk_alibi(4)"), alibi, 512, 2048, 64) == pytest.approx(512)
    assert bound(scheme("t5()"), scheme("t5()"), 512, 2048, 64) == math.inf  # flat beyond 128
    assert bound(scheme("causal()"), scheme("causal()"), 512, 2048, 64) == math.inf
    table = scheme("learned(512)")
    assert bound(table, table, 512, 2048, 64) == 511
    assert bound(scheme("learned_interpolated(512, 4)"), table, 512, 4096, 64) == pytest.approx(
        2047, abs=4
    )
    assert bound(scheme("hierarchical(512)"), table, 512, 2048, 64) == 512**2 - 1
