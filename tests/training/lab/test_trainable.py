"""Which schemes train, what they are read with, and that `all` is all."""

from __future__ import annotations

import pytest

from longitude.core.part import PARTS
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.training.lab.model import (
    at_test,
    check_trainable,
    hwfa_window,
    parse_schemes,
    trainable_schemes,
)

# what `all` leaves out, and why
ELSEWHERE = {
    "alibi_interpolated": "for reading with a trained ALiBi model",
    "ntk_alibi": "for reading with a trained ALiBi model",
    "learned_interpolated": "for reading on with a trained table",
    "learned_tiled": "for reading on with a trained table",
    "llama4_temperature": "starts at 8,192 tokens",
    "temperature": "a constant, which training absorbs",
    "sequential": "what every scheme has without another policy",
    "drope": "inside the trained length it is attention without positions: tune --recipe drope",
    "bidirectional": "sees what a decoder must predict",
    "chunked": "a window cut at fixed places",
}


def test_all_names_every_part_that_can_be_trained():
    text = " ".join(trainable_schemes(256, 4))
    sites = ("positions", "embed", "rotary", "decay", "bias", "scale", "mask")
    names = {name for name, part in PARTS.items() if part.site in sites}
    missing = {name for name in names - set(ELSEWHERE) if f"{name}(" not in text}
    assert not missing


@pytest.mark.parametrize(("length", "layers"), [(32, 2), (256, 4), (512, 18)])
def test_all_can_be_trained(length, layers):
    assert len(parse_schemes("all", length, layers)) == len(trainable_schemes(length, layers))


def test_hwfas_window_is_the_posts():
    assert abs(hwfa_window(512, 24) - 17) <= 1  # the post takes 16 for 24 layers and 512 tokens


@pytest.mark.parametrize(
    ("scheme", "sentence"),
    [
        ("rope(remap=rerope(64))", "made for reading"),
        ("rope(remap=streaming(4, 60))", "made for reading"),
        ("rope() + bidirectional()", "ahead"),
        ("t5(bidirectional=True)", "one direction"),
        ("learned(255)", "outside the table of 255"),
        ("equal_mean(256) + t5()", "not whole"),
        ("equal_mean(256) + shaw(16)", "not whole"),
        ("equal_mean(256) + learned(512)", "real-valued"),
        ("pose(100) + rope()", "do not fit"),
        ("randomized(128) + rope()", "do not fit"),
        ("layers(rope(), rope(), rope())", "tile"),
    ],
)
def test_what_can_not_be_trained_says_why(scheme, sentence):
    with pytest.raises(UserError, match=sentence) as raised:
        check_trainable(parse(scheme), 256, 4)
    assert len(str(raised.value).split(". ")) == 1


@pytest.mark.parametrize(
    "policy", ["randomized(512)", "equal_mean(256)", "pose(512)", "sequential()"]
)
@pytest.mark.parametrize("encoding", ["rope()", "sinusoidal()", "alibi()", "kerple_log()"])
def test_policies_work_with_every_encoding_that_takes_their_numbers(policy, encoding):
    check_trainable(parse(f"{policy} + {encoding}"), 256, 4)


def test_inverse_leaky_is_read_as_plain_rope():
    assert dump(at_test(parse("rope(base=5000, remap=inverse_leaky(64, 8))"))) == "rope(base=5000)"
    both = "layers(rope(remap=inverse_leaky(64, 8)), rope() + window(16))"
    assert dump(at_test(parse(both))) == "layers(rope(), rope() + window(16))"


def test_no_scheme_is_a_mistake():
    with pytest.raises(UserError, match="names none"):
        parse_schemes(" ; ", 256, 4)
