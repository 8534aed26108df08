"""Other spectra, against their papers' formulas and public codes, pair by pair in float64."""

import math

import pytest
import torch

from longitude import UserError, attention, parse
from longitude.parts import FloorToZero, PowerBasis, Proportional, Resonance, TruncatedBasis, Yarn

D, BASE = 128, 10000.0
THETA = [BASE ** (-2 * i / D) for i in range(D // 2)]


def same(part, expected) -> None:
    got = part.inv_freq(D, BASE, 4096)
    want = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_resonance_rounds_every_wavelength():
    rounded = [round(2 * math.pi / theta) for theta in THETA]
    assert rounded[:6] == [6, 7, 8, 10, 11, 13]
    same(Resonance(), [2 * math.pi / wavelength for wavelength in rounded])
    change = [abs(1 - w * t / (2 * math.pi)) for t, w in zip(THETA, rounded, strict=True)]
    assert max(change) == pytest.approx(0.0452, abs=0.0001)


def test_resonance_is_applied_after_a_scaling_and_keeps_its_gain():
    yarn = Yarn(16, original=4096)
    scaled = yarn.inv_freq(D, BASE, 4096).tolist()
    same(Resonance(yarn), [2 * math.pi / round(2 * math.pi / theta) for theta in scaled])
    assert Resonance(yarn).gain(4096) == yarn.gain(4096)


def test_angles_of_resonance_repeat_whatever_the_position():
    """The authors take (p mod wavelength)·θ; our tables need not."""
    n, d = 6, 16
    q, k, v = torch.randn(3, 1, 2, n, d, dtype=torch.float64)
    scheme = parse("rope(base=10, frequencies=resonance())")
    periods = [round(2 * math.pi * 10 ** (2 * i / d)) for i in range(d // 2)]
    far = math.lcm(*periods)
    near, moved = (
        attention(scheme, q, k, v, range(start, start + n), range(n)) for start in (n, n + far)
    )
    torch.testing.assert_close(moved, near, rtol=0, atol=1e-7)


def test_giraffes_power_basis():
    same(PowerBasis(), [t * (1 - 2 * i / D) ** 0.5 for i, t in enumerate(THETA)])
    assert float(PowerBasis().inv_freq(D, BASE, 1)[-1]) == pytest.approx(THETA[-1] * 0.125)


def test_giraffes_truncated_basis():
    cut = 2 * math.pi / 4096
    same(TruncatedBasis(4096), [t if t >= cut else cut / 16 if t >= cut / 8 else 0 for t in THETA])


@pytest.mark.parametrize("length", [512, 4096, 10**6])
def test_slow_pairs_are_stopped(length):
    kept = [t for t in THETA if t * length >= 2 * math.pi]
    same(FloorToZero(length), kept + [0.0] * (len(THETA) - len(kept)))
    share = len(kept) / len(THETA)
    same(Proportional(share), FloorToZero(length).inv_freq(D, BASE, 1).tolist())


def test_rope_id_finishes_every_turn_in_the_window():
    rope = parse("rope_id(4096, 128)").rotary
    assert rope.base == pytest.approx(803.45, abs=0.01) and rope.dim(128) == 64
    slowest = rope.frequencies.inv_freq(64, rope.base, 1)[-1]
    assert 2 * math.pi / float(slowest) == pytest.approx(4096)


@pytest.mark.parametrize("of", ["stepped('yarn', original=64)", "dynamic_ntk(64)"])
def test_resonance_rounds_fixed_frequencies_only(of):
    with pytest.raises(UserError, match="fixed"):
        parse(f"rope(frequencies=resonance({of}))")


def test_rope_id_needs_two_pairs():
    with pytest.raises(UserError, match="two pairs"):
        parse("rope_id(4096, 4)")
