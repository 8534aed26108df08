"""The numbers behind the pictures, against formulas written down once more here."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from longitude import Dims, Scheme, attention, parse
from longitude.inspection import catalogue, curves
from longitude.inspection.curves import page
from longitude.parts import Alibi, LogN, Rope, Window

DIMS = Dims(dim=32, heads=4, head_dim=8)


def scheme(text: str) -> Scheme:
    found = parse(text)
    assert isinstance(found, Scheme)
    return found


def believed(text: str, length: int) -> dict[int, float | None]:
    return {r.distance: r.believed for r in curves.distances(scheme(text), length)}


@pytest.mark.parametrize("length", [50, 3000])
def test_distance_maps_are_the_papers_formulas(length: int) -> None:
    w, k = 16, 4
    for r, told in believed(f"rope(remap=leaky_rerope({w}, {k}))", length).items():
        assert told == pytest.approx(r if r < w else w + (r - w) / k)
    for r, told in believed(f"rope(remap=rerope({w}))", length).items():
        assert told == min(r, w)
    last = length - 1
    for r, told in believed(f"rope(remap=self_extend({k}, {w}))", length).items():
        grouped = last // k - (last - r) // k + w - w // k
        assert told == (r if r < w else grouped)


def test_hidden_pairs_have_no_distance() -> None:
    told = believed("rope(remap=streaming(4, 16))", 100)
    assert [r for r, d in told.items() if d is None] == list(range(16, 96))
    assert [told[r] for r in range(96, 100)] == [16, 17, 18, 19]
    assert believed("rope() + window(16)", 100) == {}  # no remap: the mask shows it
    assert believed("randomized(400) + rope()", 100)[10] == 40


def test_decay_is_the_mean_cosine() -> None:
    rows = curves.decay(scheme("rope(base=100, frequencies=linear(2), decay=xpos())"), 100, 8)
    theta = [100 ** (-2 * i / 8) for i in range(4)]
    zeta = [(2 * i / 8 + 0.4) / 1.4 for i in range(4)]
    for row in rows:  # all distances, for there are few
        waves = [
            math.cos(row.distance * t / 2) * z ** (row.distance / 512)
            for t, z in zip(theta, zeta, strict=True)
        ]
        assert row.mean == row.low == row.high == pytest.approx(sum(waves) / 4)
        assert row.plain == pytest.approx(sum(math.cos(row.distance * t) for t in theta) / 4)


def test_decay_of_many_distances_is_averaged_between_rows() -> None:
    rows = curves.decay(scheme("rope()"), 4000, 16)
    theta = torch.tensor([10000 ** (-2 * i / 16) for i in range(8)], dtype=torch.float64)
    for row, after in pairwise(rows):
        r = torch.arange(row.distance, after.distance)[:, None]
        each = torch.cos(r * theta).mean(1)
        assert row.mean == pytest.approx(float(each.mean()))
        assert (row.low, row.high) == pytest.approx((float(each.min()), float(each.max())))
    hidden = curves.decay(scheme("rope() + window(100)"), 4000, 16)
    assert [r.mean is None for r in hidden] == [r.distance >= 100 for r in hidden]


def test_wavelengths_say_what_became_of_each_pair() -> None:
    rows = curves.wavelengths(scheme("rope(frequencies=by_parts(4, original=256))"), 1024, 16)
    for row in rows:
        plain = 2 * math.pi * 10000 ** (2 * row.pair / 16)
        keep = min(1, max(0, (256 / plain - 1) / 31))
        scaled = 1 / ((1 - keep) / (4 * plain) + keep / plain)
        assert (row.plain, row.scaled) == pytest.approx((plain, scaled))
        states = {1: "kept", 0: "interpolated"}
        assert row.state == states.get(keep, "mixed")
    still = curves.wavelengths(scheme("rope(frequencies=proportional(0.5))"), 64, 16)
    assert (
        [w.scaled is None for w in still]
        == [w.state == "still" for w in still]
        == [0] * 4 + [1] * 4
    )
    faster = curves.wavelengths(scheme("rope(frequencies=linear(0.5))"), 64, 16)
    assert {w.state for w in faster} == {"shortened"}


def test_bias_of_alibi_and_its_heads() -> None:
    rows = curves.bias(Scheme.of(Alibi(), Window(40)), 64, Dims(dim=64, heads=8, head_dim=8))
    assert sorted({r.head for r in rows}) == [0, 2, 5, 7]
    for r in rows:
        slope = 2.0 ** -(r.head + 1)
        assert r.bias == (pytest.approx(-slope * r.distance) if r.distance < 40 else None)


def test_bias_of_both_directions_has_the_query_in_the_middle() -> None:
    rows = curves.bias(scheme("alibi(future=2) + bidirectional()"), 21, DIMS)
    head = {r.distance: r.bias for r in rows if r.head == 0}
    assert list(head) == list(range(-10, 11))
    assert head[-4] == pytest.approx(-0.25 * 8) and head[4] == pytest.approx(-0.25 * 4)


def test_bias_is_what_attention_adds() -> None:
    s, n = scheme("t5(8, 16) + kerple_log() + fire(4)"), 20
    weights = {k: w.double() for k, w in s.init(DIMS, torch.Generator().manual_seed(0)).items()}
    q, k = torch.zeros(2, 1, DIMS.heads, n, DIMS.head_dim, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64).expand(1, DIMS.heads, n, n)
    log = attention(s, q, k, v, range(n), range(n), weights, backend="eager")[0, :, -1].log()
    for h in range(DIMS.heads):
        row = {r.distance: r.bias or 0.0 for r in curves.bias(s, n, DIMS) if r.head == h}
        added = torch.tensor([row[n - 1 - j] for j in range(n)], dtype=torch.float64)
        torch.testing.assert_close(added.log_softmax(0), log[h])


def test_scale_counts_what_a_query_sees() -> None:
    n = 100
    windowed = curves.scale(Scheme.of(Rope(), LogN(16), Window(32, sinks=2)), n, DIMS)
    for r in windowed:
        assert r.seen == sum(r.position - j < 32 or j < 2 for j in range(r.position + 1))
        assert r.factor == pytest.approx(max(1, math.log(r.seen, 16)))
    both = curves.scale(scheme("rope() + logn(16) + bidirectional()"), n, DIMS)
    assert {r.seen for r in both} == {n}
    cooled = curves.scale(scheme("temperature(2) + logn(16, clip=False)"), n, DIMS)
    assert cooled[4].factor == pytest.approx(math.log(5, 16) / 2)


def test_visible_pairs_are_the_masks() -> None:
    g = curves.grid(scheme("window(10, sinks=1)"), 30)
    assert g.tokens == tuple(range(30))
    for i, line in enumerate(g.believed):
        seen = [0 <= i - j and (i - j < 10 or j < 1) for j in range(30)]
        assert list(line) == [i - j if s else None for j, s in enumerate(seen)]
    wide = curves.grid(scheme("causal()"), 5000)
    assert wide.tokens[0] == 0 and wide.tokens[-1] == 4999 and len(wide.tokens) == curves.GRID


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("count", [1, 2, 100, 129, 1000, 10_000_000])
def test_samples_are_few_sorted_and_reach_both_ends(count: int, even: bool) -> None:
    found = [*curves.sample(count, even)]
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] == count - 1
    assert len(found) <= 2 * curves.SAMPLES + 2


def test_default_lengths_come_from_the_scheme() -> None:
    expected = {
        "rope()": 2048,
        "window(1020, sinks=4)": 2040,
        "rope(frequencies=yarn(16, original=4096))": 65536,
        "window(4)": 64,
        "randomized(2048) + rope()": 512,
        "window(1000000000000)": catalogue.MAX_LENGTH,
    }
    assert {text: catalogue.default_length(scheme(text)) for text in expected} == expected
    assert (
        catalogue.named_trained_length(scheme("rope(frequencies=yarn(2, original=64)) + logn(128)"))
        == 64
    )
    assert catalogue.named_trained_length(scheme("rope() + window(8)")) is None


def test_a_head_that_fits_is_chosen() -> None:
    s = parse("rope(fraction=0.5, frequencies=longrope((1, 1, 1), (2, 2, 2), original=64))")
    assert page(s).dim == 12


def test_notes_say_what_pictures_do_not() -> None:
    def notes(text: str) -> str:
        return " ".join(page(parse(text)).sheets[0].notes)

    gain = (0.1 * math.log(4) + 1) ** 2
    assert f"by {gain:.3f}" in notes("rope(frequencies=yarn(4, original=64))")
    assert "depends on the length" in notes("rope(frequencies=dynamic_ntk(64))")
    assert "depends on the query" in notes("rope(frequencies=stepped('linear', original=64))")
    assert "evenly spaced" in notes("randomized(64) + alibi()")
    assert "plain positions" in notes("pose(64) + alibi()")
    assert notes("rope() + window(8)") == ""
