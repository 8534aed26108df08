"""The four properties, against what the definitions say when they are written out once more."""

from __future__ import annotations

import math

import pytest
import torch

from longitude import Dims, Scheme, parse
from longitude.core.validate import UserError
from longitude.inspection.properties import abel_bound, check
from longitude.inspection.rows import Extrapolation, Properties, plain
from longitude.inspection.score_variance import ScoreModel
from longitude.ops.attention import terms

RELATIVE = (
    "causal()",
    "rope()",
    "rope(fraction=0.25)",
    "rope(frequencies=yarn(4, original=64))",
    "rope(frequencies=dynamic_ntk(64))",
    "rope(decay=xpos())",
    "rope(remap=rerope(32))",
    "rope(remap=leaky_rerope(32, 3))",
    "rope() + bidirectional()",
    "rope() + window(40)",
    "rope() + temperature(2)",
    "alibi()",
    "t5(bidirectional=True) + bidirectional()",
    "kerple_log() + sandwich()",
    "shaw(16)",
    "transformer_xl()",
    "deberta(64) + bidirectional()",
)
NOT = (
    "learned(256)",
    "sinusoidal()",
    "hierarchical(32)",
    "floater()",
    "rope() + logn(64)",
    "rope(frequencies=stepped('yarn', original=64))",
    "rope(remap=self_extend(5, 32))",
    "rope(remap=dual_chunk(48, 8))",
    "fire(threshold=64)",
)


def scheme(text: str) -> Scheme:
    found = parse(text)
    assert isinstance(found, Scheme)
    return found


def sheet(text: str, length: int = 256, trained: int = 64, dim: int = 16) -> Properties:
    return check(parse(text), dim=dim, heads=4, length=length, trained=trained).sheets[0]


def field(text: str, length: int, dim: int = 8, heads: int = 2) -> ScoreModel:
    return ScoreModel(scheme(text), length, Dims(dim=dim * heads, heads=heads, head_dim=dim))


def far(text: str, length: int = 256, trained: int = 64, dim: int = 16) -> Extrapolation:
    return sheet(text, length, trained, dim).extrapolation


# distances between codes are what attention's own scores of random content show


@pytest.mark.parametrize(
    "text",
    [
        "rope(fraction=0.5)",
        "rope(pairs='adjacent', decay=xpos(scale_base=8)) + logn(4)",
        "rope(frequencies=yarn(4, original=4), remap=leaky_rerope(3, 4)) + alibi()",
        "rope(frequencies=stepped('yarn', original=4))",
    ],
)
def test_distances_are_those_of_drawn_scores(text: str) -> None:
    n, d, draws = 12, 8, 4000
    f = field(text, n, d)
    rng = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, draws, 2, 1, d, generator=rng, dtype=torch.float64)
    made = terms(f.scheme, q.expand(-1, -1, n, -1), k.expand(-1, -1, n, -1), range(n), range(n))
    pairs = torch.tensor([[11, 0], [11, 5], [4, 3], [7, 7], [9, 2]])
    for a in pairs:
        for b in pairs:
            drawn = (made.total[:, :, *a] - made.total[:, :, *b]).square().mean()
            told = f.squared_distance(*(x[None] for x in (*a, *b)))[0]
            assert float(told) == pytest.approx(float(drawn), rel=0.12, abs=1e-12)


def test_distances_of_embeddings_are_those_of_drawn_projections() -> None:
    f = field("sinusoidal(base=50)", 40, dim=8, heads=2)
    width, draws = 16, 4000
    p = f.embedding(torch.arange(40))
    rng = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, draws, width, generator=rng, dtype=torch.float64)
    a = torch.randn(draws, width, width, generator=rng, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        return torch.einsum("ba,bac,bc->b", x + p[i], a, y + p[j]) / width

    for i, j, i2, j2 in [(30, 4, 20, 9), (30, 4, 30, 5), (12, 3, 32, 23)]:
        drawn = (score(i, j) - score(i2, j2)).square().mean()
        told = f.squared_distance(*(torch.tensor([t]) for t in (i, j, i2, j2)))[0]
        assert float(told) == pytest.approx(float(drawn), rel=0.1)


# uniqueness


def test_uniqueness_of_rope_is_the_least_over_all_differences() -> None:
    found = sheet("rope(base=100)", length=300).uniqueness
    theta = [100 ** (-2 * t / 16) for t in range(8)]
    least = min(
        math.sqrt(2 / 16 * sum(2 * (1 - math.cos(r * t)) for t in theta)) for r in range(1, 300)
    )
    assert found.least == pytest.approx(least)
    assert (found.shared, found.compared) == (0, 300)


def test_keys_that_share_a_code_are_counted() -> None:
    assert sheet("rope(remap=rerope(100))").uniqueness.shared == 256 - 100
    tiled = sheet("learned_tiled(200)").uniqueness
    assert tiled.least == 0 and tiled.shared == 2 * 56 and tiled.pair == (0, 200)
    buckets = sheet("t5(8, 32)").uniqueness  # the last four of eight hold more than one distance
    assert buckets.least == 0 and buckets.shared == 256 - 4
    assert sheet("causal()").uniqueness.shared == 256
    assert sheet("rope() + window(30)").uniqueness.compared == 30
    assert sheet("rope() + window(1)").uniqueness.least is None


# relativity


@pytest.mark.parametrize("text", RELATIVE)
def test_relativity_is_exactly_0_where_distance_is_all(text: str) -> None:
    found = sheet(text).relativity
    assert (found.spread, found.share, found.uneven, found.exact) == (0, 0, 0, True)


@pytest.mark.parametrize("text", NOT)
def test_relativity_is_not_0_where_it_is_not(text: str) -> None:
    found = sheet(text).relativity
    assert found.spread > 1e-4 and 0 < found.share <= 1 and not found.exact


def test_masks_that_are_no_function_of_distance_are_told() -> None:
    for text in ("rope(remap=streaming(4, 60))", "window(60, sinks=4)", "chunked(64)"):
        found = sheet(text).relativity
        assert found.uneven > 0 and not found.exact


def test_spread_is_the_distance_to_the_nearest_function_of_distance() -> None:
    n = 16  # few enough for every query and every distance
    found = sheet("logn(4)", length=n).relativity
    factor = [max(1.0, math.log(i + 1, 4)) for i in range(n)]
    squares, count = 0.0, 0
    for r in range(n):
        held = factor[r:]
        mean = sum(held) / len(held)
        squares += sum((f - mean) ** 2 for f in held)
        count += len(held)
    assert found.spread == pytest.approx(math.sqrt(squares / count))


def test_sinusoidal_products_are_relative_and_their_scores_are_not() -> None:
    found = sheet("sinusoidal()").relativity
    assert found.inner == 0 and found.share > 0.5
    learned = sheet("learned(256)").relativity.inner
    assert learned is not None and learned > 0.1
    assert sheet("rope()").relativity.inner is None


# extrapolation


def test_pairs_that_never_turned_meet_unseen_angles() -> None:
    plain = far("rope()")
    theta = [10000 ** (-2 * t / 16) for t in range(8)]
    assert plain.unseen == sum(64 * t < 2 * math.pi for t in theta) and plain.pairs == 8
    assert plain.believed == 255
    for text in (
        "rope(frequencies=linear(4))",
        "rope(remap=rerope(32))",
        "rope() + window(40)",
        "rope(remap=leaky_rerope(32, 16))",
    ):
        assert far(text).unseen == 0, text
    assert far("randomized(1024) + rope()").unseen == 0  # training draws all of it
    assert far("rope(remap=inverse_leaky(16, 8))").unseen == 0  # and here it steps over it
    ntk = far("rope(frequencies=ntk(4))").unseen
    assert ntk is not None and plain.unseen is not None and 0 < ntk < plain.unseen


def test_novelty_is_the_distance_to_the_nearest_trained_code() -> None:
    theta = torch.tensor([10000 ** (-2 * t / 16) for t in range(8)], dtype=torch.float64)
    wave = torch.polar(torch.ones(256, 8).double(), torch.arange(256)[:, None] * theta)
    apart = (2 / 16 * (wave[:, None] - wave[:64]).abs().square().sum(-1)).sqrt()
    assert far("rope()").novelty["rotation"] == pytest.approx(float(apart.amin(1).max()))
    slopes = [2.0 ** -(8 * h / 4) for h in (1, 2, 3, 4)]
    steeper = math.sqrt(sum((m * (255 - 63)) ** 2 for m in slopes) / 4)
    assert far("alibi()").novelty == {"bias": pytest.approx(steeper)}
    for text in ("rope(remap=rerope(32))", "t5(8, 32)", "learned_tiled(64)", "shaw(16)"):
        assert far(text).total_novelty == 0, text
    assert far("rope(frequencies=yarn(4, original=64))").scale > 1
    assert far("rope() + window(64)").hidden == 0.75


@pytest.mark.parametrize(
    "text",
    [
        "rope(remap=rerope(1024))",
        "rope(remap=leaky_rerope(1024, 4))",
        "rope() + window(1000)",
        "alibi() + window(1000)",
        "t5()",
        "randomized(1000000) + rope()",
    ],
)
def test_nothing_is_strange_that_was_trained_on_very_long_texts(text: str) -> None:
    found = check(parse(text), dim=8, heads=2, length=800_000, trained=400_000)
    strange = found.sheets[0].extrapolation
    # leaky distances fall between whole ones, half a step from one at most
    most = 0.5 if "leaky" in text else 0
    assert strange.total_novelty is not None and strange.total_novelty <= most
    assert strange.unseen in (0, None)
    if "window" in text:
        assert strange.hidden == 1 - 1000 / 800_000
        assert strange.believed == (999 if "rope" in text else None)


def test_a_table_ends() -> None:
    found = far("learned(100)")
    assert found.reach == 100 and found.refused and "100 positions" in found.refused
    assert found.total_novelty is None
    short = far("learned(100)", length=80, trained=5000)  # no table was trained past its end
    assert short.novelty == {"embedding": 0} and short.refused is None
    assert far("hierarchical(16)").refused is None and far("hierarchical(8)").reach == 64


# decay


@pytest.mark.parametrize(
    ("base", "numbers"),
    [
        (1e4, {0: 32.5, 1: 31.5, 16: 15.8, 256: 6.5, 1024: 4.0, 2048: 3.6, 4096: 4.9, 131072: 8.4}),
        (5e5, {1024: 9.9, 32768: 3.8}),
    ],
)
def test_the_abel_bound_has_its_published_numbers(base: float, numbers: dict[int, float]) -> None:
    f = field(f"rope(base={base})", 200_000, dim=128, heads=1)
    r = torch.tensor([*numbers])
    found = abel_bound(f, torch.tensor([199_999]), 199_999 - r)
    torch.testing.assert_close(
        found, torch.tensor([*numbers.values()], dtype=torch.float64), atol=0.051, rtol=0
    )


def test_sinusoidal_products_fall_as_published() -> None:
    found = check(parse("sinusoidal()"), dim=128, heads=1, length=4096).sheets[0]
    curve = found.curve("embedding")
    assert curve is not None and curve.negative == 1707
    assert curve.rises == pytest.approx(0.49, abs=0.01) and curve.start == pytest.approx(1)


def test_curves_stop_falling_where_they_are_lowest() -> None:
    found = sheet("rope(remap=rerope(100)) + alibi()")
    turned, biased = found.curve("rotation"), found.curve("bias")
    assert turned is not None and biased is not None
    assert turned.falls_to <= 100 and biased.falls_to == biased.rows[-1][0]
    assert biased.rises == 0 and biased.rows[3][1] == pytest.approx(
        -3 * (1 / 4 + 1 / 16 + 1 / 64 + 1 / 256) / 4
    )
    assert {c.name for c in found.decay} == {"rotation", "bound", "bias"}
    hidden = sheet("rope() + window(50)").curve("rotation")
    assert hidden is not None and all((mean is None) == (r >= 50) for r, mean in hidden.rows)


def test_decay_gives_true_values_at_true_distances() -> None:
    """Not the mean of a bin at the bin's first distance."""
    found = check(parse("rope() + alibi()")).sheets[0]
    turned, biased = found.curve("rotation"), found.curve("bias")
    assert turned is not None and biased is not None
    slope = sum(2.0**-h for h in range(1, 9)) / 8
    assert all(value == pytest.approx(-slope * r) for r, value in biased.rows)
    assert (biased.falls_to, biased.least) == (4095, pytest.approx(-slope * 4095))
    theta = torch.tensor([1e4 ** (-2 * t / 64) for t in range(32)], dtype=torch.float64)
    cosine = torch.cos(torch.arange(4096)[:, None] * theta).mean(1)
    assert turned.falls_to == int(cosine.argmin()) == 4075
    assert turned.least == pytest.approx(float(cosine.min()))
    assert all(value == pytest.approx(float(cosine[r])) for r, value in turned.rows)


def test_long_sequences_are_sampled() -> None:
    found = check(parse("rope(remap=leaky_rerope(1024, 16))"), length=1_000_000)
    assert found.sheets[0].uniqueness.compared <= 4096
    assert found.sheets[0].relativity.spread == 0
    with pytest.raises(UserError, match="transformer_xl"):
        check(parse("transformer_xl()"), length=1_000_000)


def test_layers_are_checked_once_each() -> None:
    found = check(parse("layers(rope(), alibi(), rope())"), dim=16, heads=2, length=64)
    assert [s.layers for s in found.sheets] == [(0, 2), (1,)]
    data = plain(found)
    assert data["sheets"][1]["relativity"]["spread"] == 0 and data["length"] == 64


def test_lengths_come_from_the_scheme() -> None:
    found = check(parse("rope(frequencies=yarn(4, original=2048))"), dim=16, heads=2)
    assert found.length == 8192 and found.sheets[0].extrapolation.trained == 2048
    longrope = "rope(frequencies=longrope((1, 1, 1), (2, 2, 2), original=64))"
    assert check(parse(longrope), heads=2, length=100).dim == 6
    plain = check(parse("alibi()"), dim=16, heads=2)
    assert (plain.length, plain.sheets[0].extrapolation.trained) == (4096, 1024)


@pytest.mark.parametrize("sizes", [{"length": 1}, {"dim": 0}, {"heads": 0}, {"trained": 1}])
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UserError):
        check(parse("rope()"), **sizes)  # type: ignore[arg-type]
