"""Schemes and layers: parts in their slots, weights under their names, a scheme for each layer."""

import pytest
import torch

from longitude import Dims, Layers, Scheme, Split, UserError, parse
from longitude.parts import (
    Alibi,
    Causal,
    Deberta,
    KerpleLog,
    Learned,
    LogN,
    Randomized,
    Rope,
    Sequential,
    SsMax,
    Window,
)

A, B, C = parse("rope()"), parse("window(4)"), parse("logn(8)")


def test_parts_find_their_slots_in_any_order():
    parts = [Randomized(99), Learned(5), Rope(), Alibi(), KerpleLog(), LogN(8), Window(4)]
    scheme = Scheme.of(*parts)
    assert scheme == Scheme.of(*reversed(parts)) and hash(scheme) == hash(
        Scheme.of(*reversed(parts))
    )
    assert (scheme.positions, scheme.embed, scheme.rotary) == (parts[0], parts[1], parts[2])
    assert scheme.bias == (Alibi(), KerpleLog()) and scheme.scale == (LogN(8),)
    assert scheme.mask == (Causal(), Window(4)) and scheme.parts == tuple(parts)


def test_an_empty_scheme_is_causal_and_sequential():
    assert Scheme.of() == Scheme() == Scheme.of(Sequential(), Causal())
    assert Scheme().parts == () and Scheme().causal and len(Scheme()) == 1


def test_weights_are_named_after_their_parts():
    scheme = Scheme.of(Learned(5), Rope(), KerpleLog(), SsMax())
    made = scheme.init(Dims(dim=12, heads=3, head_dim=4), torch.Generator().manual_seed(0))
    shapes = {name: tuple(w.shape) for name, w in made.items()}
    assert shapes == {
        "learned.table": (5, 12), "kerple_log.r1": (3,), "kerple_log.r2": (3,), "ssmax.s": (3,)
    }  # fmt: skip


def test_the_scale_is_the_root_of_d_unless_a_part_has_its_own():
    assert A.softmax_scale(64) == 1 / 8
    assert Scheme.of(Deberta(8)).softmax_scale(64) == (3 * 64) ** -0.5


@pytest.mark.parametrize(("layers", "picks"), [(3, "ABC"), (6, "ABCABC"), (None, "ABCAB")])
def test_layers_tile_a_model(layers, picks):
    several = Layers((A, B, C))
    assert len(several) == 3 and several.schemes == (A, B, C) and A.schemes == (A,)
    for index, name in enumerate(picks):
        assert several.layer(index, layers) == {"A": A, "B": B, "C": C}[name]
        assert A.layer(index, layers) == A


@pytest.mark.parametrize("layers", [1, 2, 4, 7])
def test_layers_that_do_not_tile_say_so(layers):
    with pytest.raises(UserError, match=f"3 schemes.*divides {layers}"):
        Layers((A, B, C)).layer(0, layers)


@pytest.mark.parametrize(
    ("share", "layers", "picks"),
    [
        (0.5, 30, "A" * 15 + "B" * 15),
        (0.5, 5, "AABBB"),
        (0.6667, 30, "A" * 20 + "B" * 10),
        (0.01, 4, "ABBB"),
        (0.99, 4, "AAAB"),
        (0.9, 2, "AB"),
        (0.5, 1, "B"),
        (0.9, None, "AB"),
    ],
)
def test_a_split_gives_the_first_share_of_the_layers_one_scheme(share, layers, picks):
    split = Split((A, B), share)
    assert len(split) == 2 and isinstance(split, Layers) and split != Layers((A, B))
    assert [split.layer(n, layers) for n in range(len(picks))] == [
        {"A": A, "B": B}[pick] for pick in picks
    ]


def test_polar_pairs_beside_a_bias_are_checked_without_its_weights():
    scheme = parse("rope(pairs='polar') + t5(100000000000000, 200000000000000)")  # more than fits
    assert scheme.bias[0].buckets == 10**14
