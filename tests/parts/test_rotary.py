"""RoPE: the turn in both layouts, its tables, and their exactness far out."""

import math

import mpmath
import pytest
import torch

from longitude import Cache, Dims, UserError, attention, parse
from longitude.core.part import Region
from longitude.core.region import Shift, at
from longitude.nn import PositionAttention
from longitude.parts import Linear, LongRope, Proportional, Rerope, Rope, Xpos, Yarn
from longitude.parts.rope import apply_rotary
from longitude.parts.rotary_tables import MIN_SIZE, Memo, cos_sin

CPU = torch.device("cpu")
WHOLE = Region()


def tables(rope, pos, dim, side="k", region=WHOLE, length=1, dtype=torch.float64, centre=0.0):
    return cos_sin(
        rope, region, side, pos, dim, length, dtype=dtype, device=CPU, centre=centre
    )  # fmt: skip


def rotated(x: torch.Tensor, position: float, theta: list[float], pairs: str) -> torch.Tensor:
    """R_m x by 2×2 blocks, one vector at a time."""
    out, half = x.clone(), len(theta)
    for t, angle in enumerate(position * f for f in theta):
        a, b = (t, t + half) if pairs == "half" else (2 * t, 2 * t + 1)
        out[..., a] = x[..., a] * math.cos(angle) - x[..., b] * math.sin(angle)
        out[..., b] = x[..., a] * math.sin(angle) + x[..., b] * math.cos(angle)
    return out


def thetas(dim: int, base: float = 10000) -> list[float]:
    return [base ** (-2 * t / dim) for t in range(dim // 2)]


def vectors(n: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, n, dim, dtype=torch.float64, generator=torch.manual_seed(seed))


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
@pytest.mark.parametrize("dim", [2, 4, 6, 64])
def test_turn_is_the_rotation_matrix(pairs, dim):
    x, rope = vectors(9, dim), Rope(pairs=pairs)
    got = apply_rotary(x, *tables(rope, range(5, 14), dim), pairs)
    for place in range(9):
        expected = rotated(x[:, :, place], 5 + place, thetas(dim), pairs)
        torch.testing.assert_close(got[:, :, place], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_scores_depend_on_relative_position_alone(pairs):
    """(R_m q)·(R_n k) = q^T R_(n-m) k, signed: the mirrored distance scores otherwise."""
    rope, q, k = Rope(500.0, pairs=pairs), vectors(1, 16)[:1, :1], vectors(1, 16, 1)[:1, :1]

    def score(m, n):
        turned = [
            apply_rotary(x, *tables(rope, range(p, p + 1), 16), pairs) for x, p in ((q, m), (k, n))
        ]
        return float((turned[0] * turned[1]).sum())

    for m, n in [(0, 0), (7, 2), (2, 7), (40, 3)]:
        relative = rotated(k, n - m, thetas(16, 500), pairs)
        assert score(m, n) == pytest.approx(float((q * relative).sum()), abs=1e-12)
        assert score(m, n) == pytest.approx(score(m + 1000, n + 1000), abs=1e-10)
    assert abs(score(7, 2) - score(2, 7)) > 0.1


def test_layouts_agree_after_permuting_the_weights():
    """Meta's checkpoints hold adjacent pairs, transformers' the same rows split in halves."""
    dim, n = 32, 12
    q, k = vectors(n, dim), vectors(n, dim, 1)
    halves = [*range(0, dim, 2), *range(1, dim, 2)]
    cos, sin = tables(Rope(), range(n), dim)

    def scores(q, k, pairs):
        return apply_rotary(q, cos, sin, pairs) @ apply_rotary(k, cos, sin, pairs).mT

    adjacent = scores(q, k, "adjacent")
    permuted = scores(q[..., halves], k[..., halves], "half")
    torch.testing.assert_close(adjacent, permuted, rtol=0, atol=1e-12)
    assert float((adjacent - scores(q, k, "half")).abs().max()) > 0.1


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_partial_rotary_turns_the_first_dimensions_by_their_own_exponents(pairs):
    """ρ·d dimensions turn, with ρ·d in the exponent; the rest pass through untouched."""
    rope, x = Rope(fraction=0.25, pairs=pairs), vectors(4, 64)
    got = apply_rotary(x, *tables(rope, range(4), 64), pairs)
    assert torch.equal(got[..., 16:], x[..., 16:])
    for m in range(4):
        expected = rotated(x[:, :, m, :16], m, thetas(16), pairs)
        torch.testing.assert_close(got[:, :, m, :16], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("head_dim", "fraction", "dim"), [(64, 1, 64), (256, 0.25, 64), (80, 0.4, 32), (96, 0.5, 48)]
)
def test_rotary_dimensions(head_dim, fraction, dim):
    assert Rope(fraction=fraction).dim(head_dim) == dim


@pytest.mark.parametrize(("head_dim", "fraction"), [(7, 1), (64, 0.01), (6, 0.5)])
def test_odd_or_no_rotary_dimensions_are_a_mistake(head_dim, fraction):
    with pytest.raises(UserError, match=r"paired.*even number"):
        Rope(fraction=fraction).dim(head_dim)


FAR = [0, 1, 4095, 131_071, 999_999, 1_048_575, 9_999_991, 10_000_000]


@pytest.mark.parametrize("base", [10000, 500_000, 1_000_000, 1e8, 2.5])
@pytest.mark.parametrize("dim", [2, 64, 128, 256])
def test_angles_are_exact_to_ten_million(base, dim):
    """Against 60 digits: 1e-6 in float32 tables and 1e-8 in float64 ones."""
    mpmath.mp.dps = 60
    theta = [mpmath.mpf(base) ** (-mpmath.mpf(2 * t) / dim) for t in range(dim // 2)]
    expected = torch.tensor(
        [[[float(f(p * x)) for x in theta] for p in FAR] for f in (mpmath.cos, mpmath.sin)],
        dtype=torch.float64,
    )
    for dtype, within in ((torch.float32, 1e-6), (torch.float64, 1e-8)):
        got = torch.stack(tables(Rope(base), torch.tensor(FAR), dim, dtype=dtype))
        assert got.dtype == dtype and got.shape == (2, 1, 1, len(FAR), dim // 2)
        assert float((got[:, 0, 0].double() - expected).abs().max()) < within
    last = torch.stack(tables(Rope(base), range(10_000_000, 10_000_001), dim))[:, 0, 0, 0]
    assert float((last - expected[:, -1]).abs().max()) < 1e-8


def test_float32_angles_would_not_be():
    """The error this guards against, around one million."""
    theta, far = torch.tensor(thetas(128), dtype=torch.float32), range(1_000_000, 1_000_064)
    rough = (torch.tensor(far, dtype=torch.float32)[:, None] * theta).cos()
    exact = tables(Rope(), far, 128)[0][0, 0]
    assert float((rough - exact).abs().max()) > 0.03


def test_tables_do_not_depend_on_what_ran_before():
    rope, pos = Rope(), range(3, 9)
    first = tables(rope, pos, 8)
    with torch.inference_mode():
        tables(rope, range(4, 10), 8)
    again = tables(rope, pos, 8)
    assert all(
        torch.equal(a, b) and not b.is_inference() for a, b in zip(first, again, strict=True)
    )
    scattered = tables(rope, torch.tensor([[3, 8, 5]]), 8)
    assert all(torch.equal(a[:, :, [0, 5, 2]], b) for a, b in zip(first, scattered, strict=True))


@pytest.mark.parametrize(
    ("frequencies", "gain"),
    [
        (Yarn(8, original=128), (0.1 * math.log(8) + 1) ** 2),
        (LongRope((1.0,) * 8, (2.0,) * 8, original=64, factor=4), math.log(256) / math.log(64)),
        (Linear(4), 1.0),
    ],
    ids=str,
)
def test_gains_ride_on_the_query_alone(frequencies, gain):
    """The gain multiplies scores once; keys stay unit rotations, so a cache of them is reusable."""
    rope = Rope(frequencies=frequencies)
    for side, size in (("q", gain), ("k", 1.0), ("pair", gain)):
        cos, sin = tables(rope, range(20), 16, side)
        torch.testing.assert_close(
            cos**2 + sin**2, torch.full_like(cos, size**2), rtol=1e-13, atol=0
        )


def test_gain_leaves_unturned_dimensions_alone():
    x = vectors(3, 16)
    rope = Rope(fraction=0.5, frequencies=Yarn(4, original=64))
    got = apply_rotary(x, *tables(rope, range(3), 16, "q"))
    assert torch.equal(got[..., 8:], x[..., 8:])
    norm = got[..., :8].norm(dim=-1) / x[..., :8].norm(dim=-1)
    torch.testing.assert_close(
        norm, torch.full_like(norm, (0.1 * math.log(4) + 1) ** 2), rtol=1e-12, atol=0
    )


def test_proportional_pairs_past_the_share_stand_still():
    cos, sin = tables(Rope(frequencies=Proportional(0.25)), range(50), 16)
    assert torch.equal(cos[..., 2:], torch.ones_like(cos[..., 2:])) and not sin[..., 2:].any()
    assert sin[..., 1:, :2].abs().min() > 0


@pytest.mark.parametrize("centre", [0.0, 700.0])
def test_xpos_decays_each_pair_by_its_zeta(centre):
    """Scores of pair t × ζ_t^((m-n)/σ), ζ_t = (2t/d + γ)/(1 + γ), wherever the gain is centred."""
    dim, m, n = 8, 901, 640
    rope = Rope(decay=Xpos())
    q, k = vectors(1, dim)[0, 0, 0], vectors(1, dim, 1)[0, 0, 0]
    turned = [
        apply_rotary(x.view(1, 1, 1, dim), *tables(rope, range(p, p + 1), dim, side, centre=centre))
        for x, p, side in ((q, m, "q"), (k, n, "k"))
    ]
    expected = 0.0
    for t, theta in enumerate(thetas(dim)):
        zeta = (2 * t / dim + 0.4) / 1.4
        pair = complex(q[t], q[t + dim // 2]) * complex(k[t], k[t + dim // 2]).conjugate()
        turned_pair = pair * complex(math.cos((m - n) * theta), math.sin((m - n) * theta))
        expected += turned_pair.real * zeta ** ((m - n) / 512)
    assert float((turned[0] * turned[1]).sum()) == pytest.approx(expected, abs=1e-11)


def test_xpos_span_is_what_float32_can_carry():
    rate = Xpos().rate(64)
    zeta = [(2 * t / 64 + 0.4) / 1.4 for t in range(32)]
    expected = torch.tensor([math.log(z) / 512 for z in zeta], dtype=torch.float64)
    torch.testing.assert_close(rate, expected, rtol=1e-13, atol=0)
    gain = zeta[0] ** (-Xpos().span(64) / 512)
    assert gain == pytest.approx(2.0**64, rel=1e-9)


def test_a_region_turns_to_its_shifted_positions():
    """A remap's tables are plain ones at other positions: ReRoPE's far scores are q^T R^(-w) k."""
    far = Rerope(7).regions()[1]
    rope, x, y = Rope(), vectors(1, 8), vectors(1, 8, 5)
    q = apply_rotary(x, *tables(rope, range(90, 91), 8, "q", far))
    k = apply_rotary(y, *tables(rope, range(3, 4), 8, "k", far))
    torch.testing.assert_close(q, rotated(x, 7, thetas(8), "half"), rtol=0, atol=1e-13)
    assert torch.equal(k, y)
    back, forth = (float((x * rotated(y, w, thetas(8), "half")).sum()) for w in (-7, 7))
    assert float((q * k).sum()) == pytest.approx(back, abs=1e-12)
    assert abs(back - forth) > 0.1  # the post prints R^w (kexue 9708)
    halved = tables(rope, range(11, 12), 8, region=Region(k=Shift(divide=2, floor=True)))
    assert torch.equal(halved[0], tables(rope, range(5, 6), 8)[0])
    fixed = tables(rope, range(9), 8, region=Region(k=at(0)))
    assert torch.equal(fixed[0], torch.ones(1, 1, 9, 4).double()) and not fixed[1].any()


def test_one_length_for_each_sequence():
    """Length-dependent frequencies in a batch: each row as if alone."""
    rope = Rope(frequencies=LongRope((1.0, 2.0), (3.0, 5.0), original=10))
    pos, lengths = torch.tensor([[4, 5], [4, 5]]), torch.tensor([[6], [60]])
    cos, _ = tables(rope, pos, 4, length=lengths)
    alone = [tables(rope, range(4, 6), 4, length=n)[0] for n in (6, 60)]
    assert torch.equal(cos, torch.cat(alone))
    assert not torch.equal(*alone)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_the_compilers_way_is_the_same_turn(pairs, monkeypatch):
    """Under torch.compile the turn is written as arithmetic that it can fuse."""
    x, (cos, sin) = vectors(5, 12), tables(Rope(), range(7, 12), 8)
    eager = apply_rotary(x, cos, sin, pairs)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(apply_rotary(x, cos, sin, pairs), eager, rtol=0, atol=1e-14)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_gradients_turn_back(pairs):
    x, weight = vectors(5, 8).requires_grad_(), vectors(5, 8, 3)
    cos, sin = tables(Rope(), range(5), 8)
    (apply_rotary(x, cos, sin, pairs) * weight).sum().backward()
    torch.testing.assert_close(x.grad, apply_rotary(weight, cos, -sin, pairs), rtol=0, atol=1e-14)


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_low_precision_is_rounded_once(pairs):
    """bfloat16 vectors turn in float32: the result is the exact turn, rounded."""
    x = vectors(6, 32).bfloat16()
    cos, sin = tables(Rope(), range(100_000, 100_006), 32)
    exact = apply_rotary(x.double(), cos, sin, pairs)
    got = apply_rotary(x, cos.float(), sin.float(), pairs)
    assert got.dtype == torch.bfloat16
    gap = (got.double() - exact).abs()
    assert bool((gap <= exact.abs() * 2**-8 + 1e-6).all())


def test_tables_are_made_once_and_their_memory_is_bounded():
    made = []

    def make(n):
        made.append(n)
        return torch.zeros(n * MIN_SIZE), torch.zeros(n * MIN_SIZE)

    memo = Memo(make, limit=100 * MIN_SIZE)
    assert memo(10)[0] is memo(10)[0] and made == [10]
    for n in range(20, 60):  # a decoder's growing tables
        memo(n)
        assert memo.size <= 100 * MIN_SIZE or len(memo.cached) == 1
    assert memo.size == sum(2 * t[0].numel() for t in memo.cached.values())
    memo(10)
    assert made.count(10) == 2


def test_many_small_tables_are_bounded_too():
    memo = Memo(lambda n: (torch.zeros(1), torch.zeros(1)), limit=10 * MIN_SIZE)
    for n in range(100):
        memo(n)
    assert len(memo.cached) == 10


@pytest.mark.parametrize("pairs", ["half", "adjacent"])
def test_a_vector_may_start_anywhere_in_memory(pairs):
    room, (cos, sin) = torch.randn(1 + 3 * 8), torch.randn(2, 1, 1, 3, 4)
    x = room[1:].view(1, 1, 3, 8)  # contiguous, at an odd place
    torch.testing.assert_close(
        apply_rotary(x, cos, sin, pairs), apply_rotary(x.clone(), cos, sin, pairs)
    )


def test_polar_pairs_are_popes_formula():
    """Σ_c softplus(q_c) softplus(k_c) cos((m - n) b^(-c/d) - δ_c) / √d, term by term; δ is kept in
    [-2π, 0]."""
    n, d, heads, base = 9, 6, 4, 50.0
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, n, d, dtype=torch.float64, generator=rng)
    k, v = torch.randn(2, 1, 2, n, d, dtype=torch.float64, generator=rng)
    delta = -7 * torch.rand(heads, d, dtype=torch.float64, generator=rng) + 0.3
    expected = torch.zeros_like(q)
    for h in range(heads):
        for m in range(n):
            scores = []
            for j in range(m + 1):
                total = 0.0
                for c in range(d):
                    phase = min(0.0, max(-2 * math.pi, float(delta[h, c])))
                    channels = (float(q[0, h, m, c]), float(k[0, h // 2, j, c]))
                    sizes = [math.log1p(math.exp(x)) for x in channels]
                    total += math.prod(sizes) * math.cos((m - j) * base ** (-c / d) - phase)
                scores.append(total / d**0.5)
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            expected[0, h, m] = weights @ v[0, h // 2, : m + 1]
    for backend in ("eager", "native", "flex", "auto"):
        got = attention(
            f"pope(base={base})",
            q,
            k,
            v,
            range(n),
            range(n),
            {"rope.delta": delta},
            backend=backend,
        )
        torch.testing.assert_close(got, expected)


def test_polar_phases_learn_and_a_cache_decodes_with_them():
    n, dims = 10, Dims(16, 4, 8)
    module = PositionAttention("pope()", dims).double()
    (delta,) = module.parameters()
    assert delta.shape == (4, 8) and not delta.any()
    delta.data -= torch.rand(4, 8, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 4, n, 8, dtype=torch.float64)
    out = module(q, k, v, range(n))
    out.square().sum().backward()
    assert delta.grad is not None and float(delta.grad.abs().min()) > 0
    cache = Cache(module.scheme)
    with torch.no_grad():
        for at in range(n):
            here = slice(at, at + 1)
            new = (x[:, :, here] for x in (q, k, v))
            got = module(*new, range(at, at + 1), cache=cache)
            torch.testing.assert_close(got, out[:, :, here])


def test_polar_pairs_refuse_what_they_cannot_have():
    with pytest.raises(UserError, match="polar pairs take all channels"):
        Rope(pairs="polar", fraction=0.5)
    with pytest.raises(UserError, match=r"untransformed by transformer_xl.*: keep one"):
        parse("pope() + transformer_xl()")
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(UserError, match=r"lack rope\.delta"):
        attention("pope()", x, x, x, range(4), range(4))
