"""The numbers that a scheme wants, and what has none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from longitude import parse
from longitude.core.scheme import Scheme
from longitude.core.validate import UserError
from longitude.runtimes.target import head_size, make_target, nearest, trained_length, unrotated

CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}


def scheme(text: str) -> Scheme:
    found = parse(text)
    assert isinstance(found, Scheme)
    return found


def test_numbers_of_a_base() -> None:
    w = make_target(parse("rope(base=1000000)"), CONFIG, 32768)
    assert w.inv_freq == pytest.approx([1e6 ** (-i / 32) for i in range(32)])
    assert (w.attention, w.original, w.length, w.base, w.dims) == (1.0, 8192, 32768, 1e6, 64)


def test_attention_is_on_cosine_and_sine() -> None:
    w = make_target(parse("rope(frequencies=yarn(4, original=2048))"), CONFIG, 8192)
    assert w.attention == pytest.approx(1 + 0.1 * math.log(4))
    assert w.original == 2048


def test_a_share_of_a_head() -> None:
    w = make_target(parse("rope(fraction=0.25, frequencies=linear(2))"), CONFIG, 16384)
    assert w.dims == 16
    assert w.inv_freq == pytest.approx([10000 ** (-i / 8) / 2 for i in range(8)])


def test_longrope_at_its_target() -> None:
    lists = f"longrope({(1.0,) * 32}, {(2.0,) * 32}, original=8192)"
    near, far = (make_target(parse(f"rope(frequencies={lists})"), CONFIG, n) for n in (8192, 8193))
    assert (near.inv_freq[0], far.inv_freq[0]) == (1.0, 0.5)


def test_sizes_stand_in_several_places() -> None:
    latent = {**CONFIG, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert head_size(CONFIG) == 64 and head_size({"text_config": CONFIG}) == 64
    assert head_size(latent) == 192 and head_size({**CONFIG, "head_dim": 128}) == 128
    scaled = {"original_max_position_embeddings": 4096}
    assert trained_length({**CONFIG, "rope_parameters": scaled}) == 4096
    with pytest.raises(UserError, match="give a complete config"):
        head_size({"vocab_size": 3})
    with pytest.raises(UserError, match="add it"):
        trained_length({"hidden_size": 3})


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ("rope(remap=rerope(512))", "rope(frequencies=yarn(4, original=8192))"),
        ("rope() + logn(8192)", "rope(frequencies=yarn(4, original=8192))"),
        ("rope(frequencies=dynamic_ntk(8192, 2))", "rope(frequencies=ntk(7))"),
        ("rope(frequencies=dynamic_linear(8192))", "rope(frequencies=linear(4))"),
        (
            "rope(base=500000, frequencies=dynamic_yarn(8192))",
            "rope(base=500000, frequencies=yarn(4, original=8192))",
        ),
        (
            "rope(frequencies=stepped('by_parts', original=8192))",
            "rope(frequencies=by_parts(4, original=8192))",
        ),
    ],
)
def test_what_has_no_numbers_is_refused_with_the_nearest(asked: str, instead: str) -> None:
    with pytest.raises(UserError) as refusal:
        make_target(parse(asked), CONFIG, 32768)
    assert str(refusal.value).endswith(f"the nearest scheme they can express is {instead}.")
    assert parse(instead) == nearest(scheme(asked), CONFIG, 32768)
    make_target(parse(instead), CONFIG, 32768)


def test_the_nearest_turns_as_it_would_at_the_target() -> None:
    asked = scheme("rope(frequencies=dynamic_ntk(8192, 2))")
    fixed = make_target(nearest(asked, CONFIG, 32768), CONFIG, 32768)
    assert asked.rotary is not None
    theirs = asked.rotary.frequencies.inv_freq(64, 10000, 32768)
    assert fixed.inv_freq == pytest.approx(theirs.tolist())


def test_no_rotation_and_layers_that_differ() -> None:
    with pytest.raises(UserError, match="has none"):
        make_target(parse("alibi()"), CONFIG, 8192)
    with pytest.raises(UserError, match="differ"):
        make_target(parse("layers(rope(), rope(base=99))"), CONFIG, 8192)
    with pytest.raises(UserError, match=r"the layers of split.* differ"):
        make_target(parse("split(streaming(4, 60), rerope(16))"), CONFIG, 8192)
    assert make_target(parse("layers(rope(), rope())"), CONFIG, 8192).dims == 64


def test_a_window_is_the_models_own_or_none() -> None:
    with pytest.raises(UserError, match="window"):
        make_target(parse("rope() + window(512)"), CONFIG, 8192)
    assert make_target(parse("rope() + window(512)"), {**CONFIG, "sliding_window": 512}, 8192)


def test_dropes_beta_is_the_square_of_the_attention_factor() -> None:
    """1 + c ln s on logits is its root on the cosine of queries and of keys."""
    own = scheme("rope()")
    rotation = unrotated(scheme("drope(8192, c=0.412, length=32768)"), own, CONFIG, 32768)
    assert rotation is not None
    w = make_target(rotation, CONFIG, 32768)
    assert w.attention**2 == pytest.approx(1 + 0.412 * math.log(4)) and max(w.inv_freq) < 1e-29
    inside = unrotated(scheme("drope(8192)"), own, CONFIG, 8192)
    assert inside is not None and make_target(inside, CONFIG, 8192).attention == 1
    each = scheme("drope(8192)")
    assert unrotated(each, own, CONFIG, 32768) is None
    with pytest.raises(UserError, match=r"each query's own: .* drope\(8192, length=32768\)\."):
        make_target(each, CONFIG, 32768)
    fixed = scheme("drope(8192, length=32768)")
    assert unrotated(fixed, scheme("rope(fraction=0.5)"), CONFIG, 32768) is None
    with pytest.raises(UserError, match=r"scale the rotated share .* nope\(\)"):
        make_target(fixed, CONFIG, 32768)
