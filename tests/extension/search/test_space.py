"""Neighbours are valid, allowed by the papers' rules, distinct, and drawn by the seed alone."""

from __future__ import annotations

import math
import re
from random import Random

import pytest

from longitude.core.scheme import Split
from longitude.core.text import dump, parse
from longitude.extension.search_space import neighbours, starts
from longitude.parts import LeakyRerope, SelfExtend

L, N = 256, 2048
SCHEMES = [
    "rope(remap=rerope(64))",
    "rope(remap=leaky_rerope(64, 16)) + logn(256)",
    "rope(remap=self_extend(16, 64))",
    "rope(remap=dual_chunk(192, 32))",
    "rope(remap=lm_infinite(256))",
    "rope(remap=streaming(4, 252))",
    "rope(frequencies=yarn(8, original=256))",
    "rope(frequencies=dynamic_yarn(256))",
    "rope(frequencies=by_parts(8, original=256))",
    "rope(frequencies=llama3(8, original=256))",
    "rope(frequencies=ntk(8))",
    "rope(frequencies=ntk_mixed(8))",
    "rope(frequencies=linear(8))",
    "rope(frequencies=dynamic_ntk(256))",
    "rope(frequencies=stepped('yarn', original=256))",
    "rope(base=500000)",
    "alibi_interpolated(8)",
    "ntk_alibi(8)",
    "learned_interpolated(256, 8)",
    "hierarchical(256)",
    "split(streaming(4, 124), rerope(64), share=0.5)",
    "layers(rope() + window(16), rope(remap=rerope(64)))",
]


def drawn(text: str, count: int = 40, seed: int = 0) -> list[str]:
    return neighbours(text, L, N, Random(seed), count)


@pytest.mark.parametrize("text", SCHEMES)
def test_neighbours_are_written_schemes_of_the_same_kind(text):
    found = drawn(text)
    assert found and len(set(found)) == len(found) <= 40
    assert dump(parse(text)) not in found
    for other in found:
        assert dump(parse(other)) == other
    assert drawn(text) == found
    plain = {other.removesuffix(" + logn(256)") for other in found}
    assert plain - {dump(parse(text))}, "its own parameters vary, not logn alone"
    assert {_names(other) for other in plain} == {_names(text.removesuffix(" + logn(256)"))}


def _names(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(\w+)\(", text.replace(" + logn(256)", "")))


def test_windows_and_factors_keep_distances_inside_the_trained_length():
    for text in drawn("rope(remap=leaky_rerope(64, 16))", 60):
        remap = parse(text).rotary.remap
        assert isinstance(remap, LeakyRerope)
        assert remap.window < L
        assert remap.window + (N - 1 - remap.window) / remap.factor <= L
    for text in drawn("rope(remap=self_extend(16, 64))", 60):
        remap = parse(text).rotary.remap
        assert isinstance(remap, SelfExtend)
        assert (L - remap.window) * remap.group + remap.window >= N


def test_scaled_frequencies_take_the_ratio_up_to_twice_it():
    for text in drawn("rope(frequencies=ntk(8))", 20):
        assert 8 <= parse(text).rotary.frequencies.factor <= 16


def test_what_else_a_scheme_says_stays():
    text = "rope(base=500000, fraction=0.5, pairs='adjacent', remap=rerope(64)) + window(999)"
    for other in drawn(text):
        found = parse(other)
        assert found.rotary.base == 500000 and found.rotary.fraction == 0.5
        assert found.rotary.pairs == "adjacent" and found.mask == parse(text).mask


def test_layers_under_a_window_stay():
    for other in drawn(SCHEMES[-1], 10):
        near, far = parse(other).schemes
        assert near == parse("rope() + window(16)") and far != near


def test_a_split_moves_and_both_of_its_windows_vary():
    found = [parse(text) for text in drawn("split(streaming(4, 124), rerope(64), share=0.5)", 200)]
    near, far = ({one.schemes[n].rotary.remap.window for one in found} for n in (0, 1))
    assert {one.share for one in found} == {0.25, 0.3333, 0.5, 0.6667, 0.75}
    assert len(near) > 4 and len(far) > 4
    assert any(one.share == 0.5 for one in found) and any(one.share != 0.5 for one in found)
    windows = [parse(text) for text in drawn("split(window(16), rerope(64), share=0.3)", 40)]
    assert all(isinstance(one, Split) for one in windows)


def test_some_neighbours_differ_in_one_parameter_and_some_in_several():
    own = parse("rope(frequencies=yarn(8, original=256))").rotary.frequencies
    names = ("factor", "fast", "slow", "attention_factor")
    others = [parse(text).rotary.frequencies for text in drawn(SCHEMES[6], 60)]
    changed = {sum(getattr(own, n) != getattr(o, n) for n in names) for o in others}
    assert 1 in changed and max(changed) > 1


def test_a_small_space_runs_out():
    assert len(drawn("learned_tiled(256)", 10)) == 1  # logn alone


def test_starts_are_valid_written_and_once():
    texts = ["rope( remap = rerope(64) )", "no_such(3)", "rope(remap=rerope(64))", "logn(1)"]
    assert starts(texts, L, N) == ["rope(remap=rerope(64))"]


def test_rules_follow_other_lengths():
    for text in neighbours("rope(remap=leaky_rerope(512, 64))", 4096, 131072, Random(1), 60):
        remap = parse(text).rotary.remap
        assert 4096 / 8 * 0.7 <= remap.window <= 4096 * 3 / 4
        assert math.isfinite(remap.factor) and remap.factor >= (131071 - 3072) / 4096
