"""Facts that the literature and its code agree on, computed here and asked of the parts."""

import math

import pytest
import torch

from longitude import Cache, Scheme, attention
from longitude.core.part import Region
from longitude.core.region import Shift
from longitude.parts import (
    Alibi,
    ByParts,
    DualChunk,
    DynamicNtk,
    Hierarchical,
    LeakyRerope,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    NtkAlibi,
    Rope,
    SelfExtend,
    Unscaled,
    Yarn,
)
from longitude.parts.biases import bucket
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import cos_sin

CPU = torch.device("cpu")


def turned(x: torch.Tensor, pos, pairs: str = "half", region: Region | None = None):
    """x (n, d) turned to positions, in float64."""
    tables = cos_sin(Rope(pairs=pairs), region or Region(), "k", pos, x.shape[-1], 1,
                     dtype=torch.float64, device=CPU)  # fmt: skip
    return apply_rotary(x[None, None], *tables, pairs)[0, 0]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slopes(part, heads: int) -> list[float]:
    one = torch.tensor([[1]])
    q = rand(1, heads, 1, 4)
    term = part.term(q, q, one, one - 1, {}, 0.5)
    zero = torch.zeros((), dtype=torch.int64)
    return (-term(zero, torch.arange(heads), zero, zero)).tolist()


@pytest.mark.parametrize(("dim", "base", "s", "original"), [(128, 5e5, 8, 8192), (64, 1e4, 4, 512)])
def test_2_llama3_is_by_parts_from_one_to_four(dim, base, s, original):
    expected = []
    for t in range(dim // 2):
        theta = base ** (-2 * t / dim)
        gamma = min(1.0, max(0.0, (original * theta / (2 * math.pi) - 1) / (4 - 1)))
        expected.append((1 - gamma) * theta / s + gamma * theta)
    got = Llama3(s, original=original).inv_freq(dim, base, 1).tolist()
    assert got == pytest.approx(expected, rel=1e-12)


def test_4_metas_rows_permuted_are_transformers_rows():
    """w.view(H, d/2, 2, D).transpose(1, 2).reshape: equal scores, and only so."""
    heads, d, width, n = 3, 8, 20, 7
    x = rand(n, width)
    wq, wk = (rand(heads * d, width, seed=s) for s in (1, 2))

    def permuted(w):
        return w.view(heads, d // 2, 2, width).transpose(1, 2).reshape(heads * d, width)

    def scores(wq, wk, pairs):
        q, k = ((x @ w.T).view(n, heads, d).transpose(0, 1) for w in (wq, wk))
        return torch.stack([turned(a, range(n), pairs) @ turned(b, range(n), pairs).T
                            for a, b in zip(q, k, strict=True)])  # fmt: skip

    meta = scores(wq, wk, "adjacent")
    torch.testing.assert_close(scores(permuted(wq), permuted(wk), "half"), meta, rtol=0, atol=1e-10)
    assert float((scores(wq, wk, "half") - meta).abs().max()) > 1


def test_5_t5_buckets():
    encoder = {7: 7, 8: 8, 11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 31: 11, 32: 12, 45: 12,
               46: 13, 63: 13, 64: 14, 90: 14, 91: 15, 10**6: 15}  # fmt: skip
    for distance, expected in encoder.items():
        assert int(bucket(torch.tensor(distance), 32, 128, True)) == expected
        assert int(bucket(torch.tensor(-distance), 32, 128, True)) == expected + 16
    decoder = {0: 0, 15: 15, 16: 16, 18: 16, 113: 31, 10**6: 31, -1: 0, -500: 0}
    for distance, expected in decoder.items():
        assert int(bucket(torch.tensor(distance), 32, 128, False)) == expected


def bloom(heads: int) -> list[float]:
    """BLOOM's build_alibi_tensor, in float64."""
    below = 2 ** math.floor(math.log2(heads))
    base = 2 ** (-(2 ** -(math.log2(below) - 3)))
    found = [base**p for p in range(1, below + 1)]
    if below != heads:
        extra = 2 ** (-(2 ** -(math.log2(2 * below) - 3)))
        more = min(below, heads - below)
        found += [extra**p for p in range(1, 1 + 2 * more, 2)]
    return found


def mpt(heads: int) -> list[float]:
    """MPT's gen_slopes with alibi_bias_max = 8, in float64."""
    above = 2 ** math.ceil(math.log2(heads))
    found = [1 / 2 ** (m * 8 / above) for m in range(1, above + 1)]
    return found if above == heads else (found[1::2] + found[::2])[:heads]


@pytest.mark.parametrize("heads", range(1, 129))
def test_6_slopes_of_bloom_and_mpt(heads):
    got = slopes(Alibi(), heads)
    assert got == pytest.approx(bloom(heads), rel=1e-12)
    assert got == pytest.approx(mpt(heads), rel=1e-12)


def test_6_ntk_alibi_by_rank():
    """At 12 heads the published code would leave four slopes alone and stop at a^(7/11)."""
    m, got = bloom(12), slopes(NtkAlibi(4), 12)
    ratio = [b / a for a, b in zip(m, got, strict=True)]
    assert ratio[m.index(max(m))] == pytest.approx(1, rel=1e-12)
    assert ratio[m.index(min(m))] == pytest.approx(1 / 4, rel=1e-12)
    in_order = [r for _, r in sorted(zip(m, ratio, strict=True), reverse=True)]
    assert in_order == sorted(ratio, reverse=True) and len(set(in_order)) == 12


def test_7_turning_again_is_turning_by_the_sum():
    """R_(b-a) R_a k = R_b k, far out too: a cache of turned keys can be turned on."""
    k = rand(3, 64)
    for a, b in [(5, 900), (900, 5), (99_999, 1_000_000)]:
        at_a, at_b = (turned(k, torch.full((3,), p)) for p in (a, b))
        again = turned(at_a, torch.full((3,), b - a))
        torch.testing.assert_close(again, at_b, rtol=0, atol=1e-9)


def test_9_hierarchical_keeps_the_table_and_tells_every_code():
    n, table = 16, rand(16, 4)
    got = Hierarchical(n).rows(table, torch.arange(n * n))
    assert torch.equal(got[:n], table)
    assert len({tuple(row) for row in got.round(decimals=9).tolist()}) == n * n
    u = (table - 0.5 * table[:1]) / 0.5  # at one half, codes (a, b) and (b, a) fall together
    halves = (0.5 * u[:, None] + 0.5 * u[None]).reshape(n * n, 4)
    assert len({tuple(row) for row in halves.round(decimals=9).tolist()}) == n * (n + 1) // 2


def test_10_critical_dimension_and_its_bounds():
    """Of Llama 2's 64 pairs 46 turn round within 4,096; what that means for larger bases."""
    d, train = 128, 4096

    def wavelengths(base):
        return 2 * math.pi / Unscaled().inv_freq(d, base, 1)

    critical = 2 * math.ceil(d / 2 * math.log(train / (2 * math.pi), 10_000))
    assert critical == 92 == 2 * int((wavelengths(10_000) <= train).sum())
    for base, reach in ((2e4, 7754), (1e5, 24656), (6e5, 89377), (1e6, 129027)):
        assert float(wavelengths(base)[critical // 2]) == pytest.approx(reach, abs=1)
    least = 10_000 ** math.log(16384 / (2 * math.pi), train / (2 * math.pi))
    assert round(least) == pytest.approx(71738, abs=1)


def test_11_dual_chunk_stays_within_its_chunk_and_is_exact_nearby():
    train = 64
    c, local = 3 * train // 4, train // 8
    i, j = torch.arange(300)[:, None], torch.arange(300)[None]
    distance, exact = torch.zeros(300, 300, dtype=torch.float64), (i - j).double()
    for region in DualChunk(c, local).regions():
        here = region.where.visible(i, j)
        distance = torch.where(here, region.q(i) - region.k(j), distance)
    causal = i >= j
    assert (float(distance[causal].min()), float(distance[causal].max())) == (0, c)
    near = causal & (i - j <= local + 1)
    assert torch.equal(distance[near], exact[near])
    just_past = causal & (i - j == local + 2)
    assert not torch.equal(distance[just_past], exact[just_past])


@pytest.mark.parametrize(("original", "s"), [(4096, 32), (8192, 4), (512, 8.0)])
def test_12_longrope_temperature_is_logn_at_the_target(original, s):
    gain = LongRope((1.0,), (2.0,), original=original, factor=s).gain(1)
    assert gain == pytest.approx(math.log(original * s) / math.log(original), rel=1e-14)


def test_13_scores_fitted_inside_explode_outside():
    """PI's figure 2: least squares on [0, L] is wild past it; a ridge or half positions are not."""
    d, train = 128, 2048
    rng = torch.Generator().manual_seed(0)
    where = torch.rand(400, generator=rng, dtype=torch.float64) * train

    def waves(pos):
        cos, sin = cos_sin(Rope(), Region(), "k", pos, d, 1, dtype=torch.float64, device=CPU)
        return torch.cat([cos, sin], -1)[0, 0]

    values, basis = rand(400), waves(where)
    exact = torch.linalg.lstsq(basis, values, driver="gelsd", rcond=1e-15).solution
    inside, outside = waves(torch.arange(train)) @ exact, waves(torch.arange(train, 2 * train))
    halves = Region(k=Shift(divide=2))
    cos, sin = cos_sin(Rope(), halves, "k", torch.arange(2 * train), d, 1, dtype=torch.float64,
                       device=CPU)  # fmt: skip
    interpolated = torch.cat([cos, sin], -1)[0, 0] @ exact
    ridge = torch.linalg.solve(basis.T @ basis + torch.eye(d), basis.T @ values)
    assert float((outside @ exact).abs().max()) > 1000 * float(inside.abs().max())
    assert float(interpolated.abs().max()) < 2 * float(inside.abs().max())
    assert float((outside @ ridge).abs().max()) < 10


def test_14_self_extend_gives_one_distance_two_values():
    i = torch.arange(9, 200)
    far = SelfExtend(4, 8).regions()[1]
    values = set((far.q(i) - far.k(i - 9)).tolist())
    assert values == {8.0, 9.0}


@pytest.mark.parametrize(("group", "window"), [(4, 8), (8, 1024), (3, 8), (5, 12)])
def test_14_self_extend_stays_on_whole_positions(group, window):
    """The authors' eager code gives fractions unless G divides W; the map here is whole always."""
    i = torch.arange(window, window + 500)
    far = SelfExtend(group, window).regions()[1]
    distance = far.q(i) - far.k(i - window)
    assert torch.equal(distance, distance.round())
    fractional = (window - window / group) % 1 != 0
    assert fractional == (window % group != 0)
    if not fractional:  # then the two halves of the map join without a jump
        assert float(distance.min()) == window


@pytest.mark.parametrize("dim", [4, 64, 128])
@pytest.mark.parametrize("s", [2.0, 8])
def test_15_ntk_keeps_the_fastest_pair_and_divides_the_slowest(dim, s):
    got = Ntk(s).inv_freq(dim, 10_000, 1)
    assert float(got[0]) == 1
    assert float(got[-1]) == pytest.approx(10_000 ** (2 / dim - 1) / s, rel=1e-13)


def test_1_leaky_rerope_is_two_matrices_is_its_map_is_its_decoding():
    n, w, k, d = 40, 9, 4, 16
    rng = torch.Generator().manual_seed(0)
    q, key, v = (torch.randn(n, d, generator=rng, dtype=torch.float64) for _ in range(3))
    at = torch.arange(n, dtype=torch.float64)
    i, j = at[:, None], at[None, :]
    near = turned(q, at) @ turned(key, at).T
    far = turned(q, (at + w * (k - 1)) / k) @ turned(key, at / k).T
    published = torch.where(i - j < w, near, far)
    r = torch.where(i - j < w, i - j, w + (i - j - w) / k)
    # q·R(-r)k, pair by pair: the map itself
    direct = torch.stack([turned(key, -r[t]) @ q[t] for t in range(n)])
    torch.testing.assert_close(published.tril(), direct.tril(), rtol=0, atol=1e-12)
    weights = (published / d**0.5).masked_fill(i < j, -torch.inf).softmax(-1)
    scheme, batched = Scheme.of(Rope(remap=LeakyRerope(w, k))), [x[None, None] for x in (q, key, v)]
    whole = attention(scheme, *batched, range(n), range(n))
    torch.testing.assert_close(whole[0, 0], weights @ v, rtol=0, atol=1e-12)
    for t in range(n):
        seen = [batched[0][:, :, t : t + 1], *(x[:, :, : t + 1] for x in batched[1:])]
        one = attention(scheme, *seen, range(t, t + 1), range(t + 1))
        torch.testing.assert_close(one, whole[:, :, t : t + 1], rtol=0, atol=1e-12)


def test_3_yarns_ramp_is_linear_in_the_index():
    dim, base, original, s = 128, 10000.0, 4096, 16
    got = Yarn(s, original=original).inv_freq(dim, base, 1)
    low, high = 20, 46  # methods: floor and ceil of d ln(L / 2πn) / (2 ln b) for n = 32 and 1
    for t in range(dim // 2):
        theta, ramp = base ** (-2 * t / dim), min(max((t - low) / (high - low), 0), 1)
        assert float(got[t]) == pytest.approx(theta / s * ramp + theta * (1 - ramp), rel=1e-12)


@pytest.mark.parametrize(
    "frequencies",
    [
        Unscaled(),
        Linear(4),
        Yarn(4, original=32),
        Llama3(4, original=32),
        ByParts(4, original=32),
        DynamicNtk(32, 2),
        LongRope((1.0,) * 4, (2.0, 3.0, 4.0, 5.0), original=32, factor=2),
    ],
    ids=str,
)
def test_8_decoding_with_a_cache_is_the_whole_forward_for_every_type(frequencies):
    """Where transformers' dynamic and longrope types differ by 2.35 and 2.90."""
    n, scheme = 64, Scheme.of(Rope(frequencies=frequencies))
    rng = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 2, n, 8, generator=rng, dtype=torch.float64) for _ in range(3)]
    whole, cache = attention(scheme, *x, range(n), range(n)), Cache(scheme, length=n)
    for t in range(n):
        q, k, v = (y[:, :, t : t + 1] for y in x)
        kept = cache.update(k, v, range(t, t + 1))
        one = attention(scheme, q, kept.k, kept.v, range(t, t + 1), kept.pos, length=n)
        torch.testing.assert_close(one, whole[:, :, t : t + 1], rtol=0, atol=1e-12)
