"""Every scaling of RoPE's frequencies against its formula, pair by pair."""

import math

import pytest
import torch

from longitude import UserError
from longitude.core.part import PARTS
from longitude.parts import (
    ByParts,
    DynamicLinear,
    DynamicNtk,
    DynamicYarn,
    FloorToZero,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    NtkMixed,
    PowerBasis,
    Proportional,
    Resonance,
    Stepped,
    TruncatedBasis,
    Unscaled,
    Yarn,
)

SIZES = pytest.mark.parametrize(("dim", "base"), [(4, 10000), (64, 1e6), (128, 10000), (80, 5e5)])


def theta(dim: int, base: float) -> list[float]:
    return [base ** (-2 * t / dim) for t in range(dim // 2)]


def same(got: torch.Tensor, expected: list[float], rel: float = 1e-13) -> None:
    assert got.dtype == torch.float64 and got.shape == (len(expected),)
    assert got.tolist() == pytest.approx(expected, rel=rel, abs=0)


def by_parts(dim, base, s, original, low, high) -> list[float]:
    """θ' = (1 - γ) θ/s + γ θ with γ linear in r = Lθ/2π, from 0 at `low` to 1 at `high`."""
    out = []
    for x in theta(dim, base):
        gamma = min(1.0, max(0.0, (original * x / (2 * math.pi) - low) / (high - low)))
        out.append((1 - gamma) * x / s + gamma * x)
    return out


def code_ramp(dim, base, s, original, fast=32, slow=1, truncate=True) -> list[float]:
    """YaRN's released ramp: linear in the index, between the pairs that turn fast and slow."""

    def index(turns):
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = index(fast), index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for t, x in enumerate(theta(dim, base)):
        mixed = min(1.0, max(0.0, (t - low) / (high - low)))
        out.append(x / s * mixed + x * (1 - mixed))
    return out


@SIZES
def test_unscaled(dim, base):
    same(Unscaled().inv_freq(dim, base, 1), theta(dim, base))
    assert Unscaled().gain(10**6) == 1


@SIZES
@pytest.mark.parametrize("s", [1, 2.5, 8])
def test_linear_divides_every_frequency(dim, base, s):
    same(Linear(s).inv_freq(dim, base, 1), [x / s for x in theta(dim, base)])
    assert Linear(s).gain(1) == 1


@SIZES
@pytest.mark.parametrize("s", [2.0, 8, 32])
def test_ntk_raises_the_base(dim, base, s):
    got = Ntk(s).inv_freq(dim, base, 1)
    same(got, theta(dim, base * s ** (dim / (dim - 2))))
    ratio = got / torch.tensor(theta(dim, base), dtype=torch.float64)
    assert float(ratio[0]) == 1 and float(ratio[-1]) == pytest.approx(1 / s, rel=1e-13)
    assert bool((ratio.diff() < 0).all())


def test_ntk_needs_two_pairs():
    with pytest.raises(UserError, match="linear"):
        Ntk(4).inv_freq(2, 10000, 1)


@SIZES
@pytest.mark.parametrize(("k", "power"), [(8, 0.625), (12, 0.75), (4, 1), (16, 0)])
def test_ntk_mixed_spreads_the_factor_by_a_power(dim, base, k, power):
    a = math.log(k) / (dim / 2) ** power
    expected = [x * math.exp(-a * (t + 1) ** power) for t, x in enumerate(theta(dim, base))]
    got = NtkMixed(k, power).inv_freq(dim, base, 1)
    same(got, expected)
    assert float(got[-1]) == pytest.approx(theta(dim, base)[-1] / k, rel=1e-12)


def test_ntk_mixed_ends_in_interpolation_and_in_the_fixed_form():
    """Power 0 is PI; power 1 is 1/(λ (βλ)^t) with β = base^(2/d), λ = k^(2/d)."""
    dim, base, k = 64, 10000, 8
    same(NtkMixed(k, power=0).inv_freq(dim, base, 1), [x / k for x in theta(dim, base)])
    beta, lam = base ** (2 / dim), k ** (2 / dim)
    fixed = [1 / (lam * (beta * lam) ** t) for t in range(dim // 2)]
    same(NtkMixed(k, power=1).inv_freq(dim, base, 1), fixed, rel=1e-12)


@SIZES
@pytest.mark.parametrize(
    ("original", "factor", "length", "alpha"),
    [(2048, 1, 4096, 2), (2048, 2, 4096, 3), (2048, 4, 4096, 5), (100, 1, 250, 2.5),
     (2048, 4, 2048, 1), (2048, 4, 7, 1)],
)  # fmt: skip
def test_dynamic_ntk_grows_with_the_length(dim, base, original, factor, length, alpha):
    """α = f·l/L - (f - 1); nothing below the trained length."""
    got = DynamicNtk(original, factor).inv_freq(dim, base, length)
    same(got, theta(dim, base * alpha ** (dim / (dim - 2))))


@SIZES
@pytest.mark.parametrize(("length", "s"), [(1, 1), (4096, 1), (4097, 4097 / 4096), (16384, 4)])
def test_dynamic_linear_interpolates_just_enough(dim, base, length, s):
    same(DynamicLinear(4096).inv_freq(dim, base, length), [x / s for x in theta(dim, base)])


@SIZES
@pytest.mark.parametrize(("s", "low", "high"), [(4, 1, 32), (16.0, 2, 8)])
def test_by_parts(dim, base, s, low, high):
    got = ByParts(s, original=4096, low=low, high=high).inv_freq(dim, base, 1)
    same(got, by_parts(dim, base, s, 4096, low, high))


@SIZES
@pytest.mark.parametrize(("s", "original"), [(8, 8192), (32, 8192), (4, 512)])
def test_llama3_is_by_parts_with_bounds_one_and_four(dim, base, s, original):
    got = Llama3(s, original=original).inv_freq(dim, base, 1)
    same(got, by_parts(dim, base, s, original, 1, 4), rel=1e-12)
    assert Llama3(s, original=original).gain(1) == 1


@pytest.mark.parametrize("kind", [ByParts, Llama3])
def test_equal_bounds_make_a_step(kind):
    plain = theta(64, 1e4)
    expected = [t / 8 if 2 * math.pi / t > 256 / 2 else t for t in plain]
    same(kind(8, original=256, low=2, high=2).inv_freq(64, 1e4, 1), expected)


def test_llama31_keeps_29_pairs_and_divides_29():
    ratio = Llama3(8, original=8192).inv_freq(128, 5e5, 1)
    ratio = (ratio / torch.tensor(theta(128, 5e5), dtype=torch.float64)).tolist()
    kept = sum(abs(r - 1) < 1e-12 for r in ratio)
    divided = sum(abs(r - 1 / 8) < 1e-12 for r in ratio)
    assert (kept, 64 - kept - divided, divided) == (29, 6, 29)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("dim", "base", "s", "original"),
    [(128, 10000, 16, 4096), (64, 150_000, 32, 4096), (64, 10000, 40, 4096), (128, 1e6, 4, 32768)],
)
def test_yarn_ramps_by_index_as_released(dim, base, s, original, truncate):
    got = Yarn(s, original=original, truncate=truncate).inv_freq(dim, base, 1)
    same(got, code_ramp(dim, base, s, original, truncate=truncate), rel=1e-12)


def test_yarn_ramp_ends():
    assert Yarn(16, original=4096).bounds(128, 10000) == (20, 46)
    low, high = Yarn(32, original=4096, truncate=False).bounds(64, 150_000)  # gpt-oss
    assert (round(low, 2), round(high, 2)) == (8.09, 17.40)


@SIZES
def test_yarn_ramps_by_turns_as_written(dim, base):
    got = Yarn(16, original=4096, ramp="paper").inv_freq(dim, base, 1)
    same(got, by_parts(dim, base, 16, 4096, 1, 32))


def test_yarn_ramps_differ():
    """25 pairs by more than 1%, one by a factor of 3: the two must not be taken for each other."""
    code = Yarn(16, original=4096).inv_freq(128, 10000, 1)
    paper = Yarn(16, original=4096, ramp="paper").inv_freq(128, 10000, 1)
    ratio = torch.maximum(code / paper, paper / code)
    assert int((ratio > 1.01).sum()) == 25
    assert int(ratio.argmax()) == 38 and float(ratio.max()) == pytest.approx(3, abs=0.15)


@pytest.mark.parametrize("s", [1.0, 2, 16, 40])
def test_yarn_temperature(s):
    """Logits × (0.1 ln s + 1)², since the factor goes on q and on k."""
    one = 0.1 * math.log(s) + 1
    assert Yarn(s, original=4096).gain(1) == pytest.approx(one**2, rel=1e-14)
    assert Yarn(s, original=4096, attention_factor=1.3).gain(1) == pytest.approx(1.69, rel=1e-14)
    both = Yarn(s, original=4096, mscale=0.707, mscale_all_dim=1.2)
    ratio = (0.0707 * math.log(s) + 1) / (0.12 * math.log(s) + 1)
    assert both.gain(1) == pytest.approx(ratio**2, rel=1e-13)
    alone = Yarn(s, original=4096, mscale=0.707)
    assert alone.gain(1) == pytest.approx(one**2, rel=1e-14)


def test_yarn_below_one_does_not_cool():
    assert Yarn(0.5, original=4096).gain(1) == 1


@pytest.mark.parametrize(("length", "s"), [(100, 1), (4096, 1), (10_000, 10_000 / 4096)])
def test_dynamic_yarn_is_yarn_by_just_the_length(length, s):
    got = DynamicYarn(4096).inv_freq(128, 10000, length)
    same(got, code_ramp(128, 10000, s, 4096), rel=1e-12)
    assert DynamicYarn(4096).gain(length) == pytest.approx((0.1 * math.log(s) + 1) ** 2)


def test_longrope_switches_past_the_trained_length():
    short, long = (1.0, 1.5, 2.0), (4.0, 8.0, 32.0)
    part = LongRope(short, long, original=512, factor=8)
    for length, factors in [(1, short), (512, short), (513, long), (10**6, long)]:
        expected = [x / f for x, f in zip(theta(6, 10000), factors, strict=True)]
        same(part.inv_freq(6, 10000, length), expected)
        assert part.gain(length) == pytest.approx(1 + math.log(8) / math.log(512), rel=1e-14)
    assert LongRope(short, long, original=512).gain(1) == 1
    assert LongRope(short, long, original=512, attention_factor=1.5).gain(1) == 2.25


def test_longrope_wants_a_factor_for_each_pair():
    with pytest.raises(UserError, match="one for each pair"):
        LongRope((1.0,), (2.0,), original=512).inv_freq(64, 10000, 1)
    for short, long in [((1.0,), (1.0, 2.0)), ((), ()), ((0.0,), (1.0,))]:
        with pytest.raises(UserError, match="positive factors"):
            LongRope(short, long, original=512)
    with pytest.raises(UserError, match="original"):
        LongRope((1.0,), (2.0,), original=1, factor=4)  # its logarithm divides


@pytest.mark.parametrize(("share", "factor"), [(0.25, 1), (0.5, 4), (1, 1), (0, 1)])
def test_proportional_keeps_the_exponents_of_the_whole_head(share, factor):
    turning = int(share * 32)
    expected = [x / factor if t < turning else 0.0 for t, x in enumerate(theta(64, 1e6))]
    same(Proportional(share, factor).inv_freq(64, 1e6, 1), expected)


@pytest.mark.parametrize("step", [1, 0.3])
@pytest.mark.parametrize("kind", ["yarn", "linear", "ntk", "ntk_mixed", "by_parts"])
def test_stepped_gives_each_query_the_factor_of_its_band(kind, step):
    """Band b starts at original·(1 + (b-1)·step) and scales by 1 + b·step."""
    original, dim, base, reach = 10, 16, 10000, 47
    formula = {
        "yarn": lambda s: code_ramp(dim, base, s, original),
        "linear": lambda s: [x / s for x in theta(dim, base)],
        "ntk": lambda s: theta(dim, base * s ** (dim / (dim - 2))),
        "ntk_mixed": lambda s: [
            x * s ** (-(((t + 1) / (dim / 2)) ** 0.625)) for t, x in enumerate(theta(dim, base))
        ],
        "by_parts": lambda s: by_parts(dim, base, s, original, 1, 32),
    }[kind]
    stepped = Stepped(kind, original=original, step=step)
    bands = stepped.bands(range(reach))
    for query in range(reach):
        factor, end = 1.0, float(original)
        while query >= end - 1e-9:
            factor, end = factor + step, end + original * step
        here = [f for area, f in bands if bool(area.visible(torch.tensor(query), torch.tensor(0)))]
        assert len(here) == 1
        expected = theta(dim, base) if factor == 1 else formula(factor)
        same(here[0].inv_freq(dim, base, 1), expected, rel=1e-11)
        gain = (0.1 * math.log(factor) + 1) ** 2 if kind == "yarn" else 1
        assert here[0].gain(1) == pytest.approx(gain, rel=1e-12)
        assert torch.equal(
            stepped.inv_freq(dim, base, query + 1), here[0].inv_freq(dim, base, query + 1)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Yarn(4, original=64, fast=2, slow=3),
        lambda: Yarn(4, original=64, slow=0),
        lambda: DynamicYarn(64, fast=2, slow=3),
        lambda: ByParts(4, original=64, low=4, high=3),
        lambda: Llama3(4, original=64, low=5, high=4),
        lambda: Linear(0),
        lambda: Ntk(-1),
        lambda: DynamicNtk(0),
        lambda: Proportional(1.1),
        lambda: Stepped("yarn", original=4, step=0.2),
    ],
)
def test_fields_that_cannot_be(make):
    with pytest.raises(UserError):
        make()


def test_a_step_may_be_one_position():
    assert len(Stepped("linear", original=4, step=0.25).bands(range(6))) == 3


def test_stepped_costs_as_many_bands_as_hold_queries():
    """At ten million positions 40 tokens took 65 s, because every band below was built."""
    far, step = 10_000_000, Stepped("yarn", original=64)
    assert len(step.bands(range(far, far + 40))) <= 2
    scattered = torch.tensor([[0, 1, 63, 64, far, 500, far + 3]])
    rows = step.sample(scattered)
    assert rows[0] == 0 and rows[-1] == far + 3 and len(step.bands(rows)) == 4
    held = [area.visible(scattered, torch.tensor(0)) for area, _ in step.bands(rows)]
    assert torch.stack(held).sum(0).eq(1).all()


@pytest.mark.unchecked  # a hundred thousand bands
@pytest.mark.parametrize("step", [1, 0.3, 2.5, 0.7])
def test_a_sample_of_positions_meets_every_band_that_holds_one(step):
    stepped, rng = Stepped("ntk", original=10, step=step), torch.Generator().manual_seed(0)
    pos = torch.randint(0, 10**6, (200,), generator=rng)
    numbers = {stepped.number(p) for p in pos.tolist()}
    assert {stepped.number(row) for row in stepped.sample(pos)} == numbers
    assert all(stepped.end(b) > p for p in pos.tolist() for b in [stepped.number(p)])


EXAMPLES = {
    "unscaled": Unscaled(),
    "linear": Linear(4),
    "ntk": Ntk(4),
    "ntk_mixed": NtkMixed(4),
    "dynamic_ntk": DynamicNtk(64),
    "dynamic_linear": DynamicLinear(64),
    "by_parts": ByParts(4, original=64),
    "llama3": Llama3(4, original=64),
    "yarn": Yarn(4, original=64),
    "dynamic_yarn": DynamicYarn(64),
    "longrope": LongRope((1.0,) * 8, (2.0,) * 8, original=64),
    "proportional": Proportional(0.5),
    "stepped": Stepped("linear", original=64),
    "resonance": Resonance(Yarn(4, original=64)),
    "power_basis": PowerBasis(),
    "truncated_basis": TruncatedBasis(64),
    "floor_to_zero": FloorToZero(64),
}


def test_every_scaling_has_an_example():
    assert set(EXAMPLES) == {name for name, p in PARTS.items() if p.site == "frequencies"}


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n != "stepped"])
def test_by_length_says_whether_the_length_matters(name):
    part = EXAMPLES[name]
    short, long = (part.inv_freq(16, 10000, n) for n in (60, 6000))
    assert part.by_length == (not torch.equal(short, long))


@pytest.mark.parametrize("name", EXAMPLES)
def test_float32_is_the_same_formula(name):
    part = EXAMPLES[name]
    wide, narrow = (part.inv_freq(16, 10000, 100, d) for d in (torch.float64, torch.float32))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=0)
