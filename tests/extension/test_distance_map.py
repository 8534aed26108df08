"""Distance maps against each method's formula."""

from __future__ import annotations

import pytest

from longitude.extension.distance_map import by_size, distance_map, maps

OWN, FAR = "rope()", 2048


def test_a_plain_rotation_tells_the_truth() -> None:
    assert all(x == low == high for x, low, high in distance_map(OWN, OWN, FAR))


def test_interpolation_divides_and_yarn_spreads() -> None:
    linear = distance_map("rope(frequencies=linear(8))", OWN, FAR)
    assert all(low == high == pytest.approx(x / 8) for x, low, high in linear)
    for x, low, high in distance_map("rope(frequencies=yarn(8, original=256))", OWN, FAR):
        assert low == pytest.approx(x / 8) and high == pytest.approx(x)


def test_a_remap_grows_slowly_past_its_window() -> None:
    for x, low, high in distance_map("rope(remap=leaky_rerope(128, 16))", OWN, FAR):
        expected = x if x < 128 else 128 + (x - 128) / 16
        assert low == high == pytest.approx(expected)


def test_what_a_window_hides_has_no_distance() -> None:
    told = {x: low for x, low, _ in distance_map("rope() + window(100)", OWN, FAR)}
    assert told[0] == 0 and all((low is None) == (x >= 100) for x, low in told.items())


def test_layers_make_a_band() -> None:
    both = distance_map("layers(rope(), rope(frequencies=linear(4)))", OWN, FAR)
    assert all((low, high) == (pytest.approx(x / 4), x) for x, low, high in both)


def test_alibi_is_told_by_its_bias() -> None:
    told = distance_map("alibi_interpolated(4)", "alibi()", FAR)
    assert all(low == high == pytest.approx(x / 4) for x, low, high in told)


def test_what_has_no_distance_has_no_map() -> None:
    assert maps({"a": "learned(256)", "b": "alibi()"}, "alibi()", FAR).keys() == {"b"}


def test_what_depends_on_the_size_of_a_head_is_named() -> None:
    schemes = {
        "base": "rope(base=1000000)",  # the slowest pair's stretch is 100 ** -(1 - 2 / size)
        "yarn": "rope(frequencies=yarn(8, original=256))",
        "remap": "rope(remap=leaky_rerope(128, 16))",
    }
    assert by_size(schemes, OWN, FAR) == ["base"]
