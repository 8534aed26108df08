"""The laws of how far a rotation reaches, against their papers' numbers."""

from __future__ import annotations

import math

import pytest
import torch

from longitude.hf.encodings import Encoding
from longitude.inspection.rope_limits import (
    cosine_sums,
    critical_base,
    critical_dimension,
    extrapolation_limit,
    first_negative,
    least_base,
    rope_limits,
)


def test_the_critical_dimension_of_llama_2_is_the_papers() -> None:
    assert critical_dimension(128, 10000, 4096) == 92
    waves = [2 * math.pi * 10000 ** (2 * i / 128) for i in range(64)]
    whole = sum(wave <= 4096 for wave in waves)
    assert 2 * whole == 92  # pairs 0 … 45: those whose wavelength fits into the window


@pytest.mark.parametrize(
    ("base", "limit"), [(2e4, 7754), (1e5, 24656), (6e5, 89377), (1e6, 129027)]
)
def test_extrapolation_limits_are_the_papers(base: float, limit: int) -> None:
    assert round(extrapolation_limit(base, 128, 92)) == limit


def test_the_critical_base_for_16k_is_the_papers() -> None:
    assert round(critical_base(10000, 4096, 16384)) == 71738
    assert critical_base(10000, 4096, 4096) == pytest.approx(10000)


def holds(base: float, length: int, dim: int = 128) -> bool:
    """Σ cos(m θ_i) >= 0 for all m below the length, in one matrix."""
    theta = base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    m = torch.arange(length, dtype=torch.float64)
    return bool((torch.cos(m[:, None] * theta).sum(1) >= 0).all())


@pytest.mark.parametrize(
    ("length", "published"),
    [
        (1024, 4.3e3),
        (2048, 1.2e4),
        (4096, 2.7e4),
        (8192, 8.4e4),
        (16384, 2.3e5),
        pytest.param(32768, 6.3e5, marks=pytest.mark.slow),
        pytest.param(65536, 2.1e6, marks=pytest.mark.slow),
        pytest.param(131072, 4.9e6, marks=pytest.mark.slow),
    ],
)
def test_least_bases_are_those_of_kexue_10122(length: int, published: float) -> None:
    found = least_base(length, 128)
    assert found and found == pytest.approx(published, rel=0.05)
    assert float(f"{found:.1e}") == published
    assert holds(found, length)
    below = [found * (1 - share / 50) for share in range(1, 25)]
    assert not any(holds(base, length) for base in below)


def test_there_is_none_for_windows_that_are_not_searched() -> None:
    assert least_base(1 << 22, 128) is None and least_base(1, 128) is None


@pytest.mark.parametrize(("length", "step"), [(1, 1), (2, 1), (1000, 1), (4097, 7), (9, 64)])
def test_sums_are_those_of_each_distance(length: int, step: int) -> None:
    theta = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    m = torch.arange(0, length, step, dtype=torch.float64)
    expected = torch.cos(m[:, None] * theta).sum(1)
    torch.testing.assert_close(cosine_sums(theta, length, step), expected, rtol=0, atol=1e-10)


def test_the_first_distance_that_is_not_heard() -> None:
    theta = 10000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    m = torch.arange(4096, dtype=torch.float64)
    sums = torch.cos(m[:, None] * theta).sum(1)
    expected = int((sums < 0).nonzero()[0])
    assert first_negative(theta, 0, 4096) == expected
    assert first_negative(theta, 0, expected) is None
    assert first_negative(theta, 64, 4096) is None  # half a head that stands still is always heard


def test_limits_are_of_the_rotation_that_is_in_force() -> None:
    """Linear scaling shows a model a quarter of its window's angles (DeepSeek-Coder), Hunyuan's
    alpha is a larger base: neither may be judged by the base of its file alone."""
    given = {"kind": "rope", "head_dim": 128, "window": 16384}
    linear = rope_limits(Encoding(scheme="rope(base=100000, frequencies=linear(4))", **given))
    plain = rope_limits(Encoding(scheme="rope(base=100000)", **given | {"window": 4096}))
    assert linear and plain and linear.critical_dimension == plain.critical_dimension == 74
    assert linear.dim - linear.critical_dimension == 2 * linear.unfinished
    assert linear.least_base == plain.least_base and linear.limit == pytest.approx(4 * plain.limit)
    stretched = rope_limits(Encoding(scheme="rope(frequencies=ntk(1000))", **given))
    assert stretched and stretched.base == pytest.approx(10000 * 1000 ** (128 / 126))
    assert stretched.dim - stretched.critical_dimension == 2 * stretched.unfinished
