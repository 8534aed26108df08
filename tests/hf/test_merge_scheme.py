"""What a text leaves out comes from the checkpoint, and what it says against it is refused."""

from __future__ import annotations

import pytest

from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.hf.merge_scheme import merge_scheme

NEOX = parse("rope(base=500000, fraction=0.25)")
SCALED = parse("rope(base=500000, frequencies=llama3(8, original=8192))")
LOCAL = parse("rope() + window(512)")
GLOBAL = parse("rope(base=1000000, pairs='adjacent')")
NOPE = parse("causal()")


def full(asked, *own, trained=8192, force=False):
    return [str(scheme) for scheme in merge_scheme(asked, own, trained, force)]


@pytest.mark.parametrize(
    ("asked", "own", "wanted"),
    [
        ("rope(remap=rerope(4096))", NEOX, "rope(base=500000, fraction=0.25, remap=rerope(4096))"),
        ("logn(8192)", NEOX, "rope(base=500000, fraction=0.25) + logn(8192)"),
        ("rope(base=10000)", NEOX, "rope(fraction=0.25)"),
        ("rope(10000)", NEOX, "rope(fraction=0.25)"),
        (
            "rope(frequencies=linear(4))",
            GLOBAL,
            "rope(base=1000000, pairs='adjacent', frequencies=linear(4))",
        ),
        (
            "rope(remap=rerope(64))",
            SCALED,
            "rope(base=500000, frequencies=llama3(8, original=8192), remap=rerope(64))",
        ),
        ("rope(frequencies=unscaled())", SCALED, "rope(base=500000)"),
        (
            "window(128, sinks=4)",
            GLOBAL,
            "rope(base=1000000, pairs='adjacent') + window(128, sinks=4)",
        ),
        ("window(128)", LOCAL, "rope() + window(512)"),
        ("rope(remap=rerope(64))", NOPE, "causal()"),
        (
            "streaming_llm(4, 60)",
            GLOBAL,
            "rope(base=1000000, pairs='adjacent', remap=streaming(4, 60))",
        ),
    ],
)
def test_what_is_left_out_is_the_checkpoints(asked, own, wanted):
    assert full(asked, own) == [wanted]


def test_each_layer_keeps_its_own():
    found = full("rope(remap=leaky_rerope(64, 4))", LOCAL, GLOBAL, NOPE)
    assert found == [
        "rope(remap=leaky_rerope(64, 4)) + window(512)",
        "rope(base=1000000, pairs='adjacent', remap=leaky_rerope(64, 4))",
        "causal()",
    ]


def test_layers_are_taken_layer_by_layer():
    text = "layers(rope(remap=rerope(64)) + window(32), rope(base=10000))"
    assert full(text, LOCAL, NEOX, LOCAL, NEOX) == 2 * [
        "rope(remap=rerope(64)) + window(32)",
        "rope(fraction=0.25)",
    ]


def test_a_split_counts_the_layers():
    text = "split(far=rope(base=10000), near=rerope(64), share=0.4)"
    assert full(text, *5 * [GLOBAL]) == [
        *2 * ["rope(base=1000000, pairs='adjacent', remap=rerope(64))"],
        *3 * ["rope(pairs='adjacent')"],
    ]
    assert full("split(rerope(64))", *2 * [GLOBAL]) == full(
        parse("split(rerope(64))"), *2 * [GLOBAL]
    )


def test_a_value_counts_as_its_text():
    assert full(parse("rope(remap=rerope(64))"), NEOX) == full("rope(remap=rerope(64))", NEOX)


@pytest.mark.parametrize(
    ("asked", "own", "said"),
    [
        ("rope(pairs='adjacent')", NEOX, "trained with rope"),
        ("rope(pairs='half')", GLOBAL, "trained with rope"),
        ("rope(fraction=0.5)", NEOX, "trained with rope"),
        ("rope(fraction=1)", NEOX, "trained with rope"),
        ("rope(decay=xpos())", NEOX, "trained with rope"),
        ("alibi()", NEOX, "say force=True"),
        ("t5()", NEOX, "weights of its own"),
        ("learned(512)", NEOX, "before the first layer"),
        ("randomized(512) + rope()", NEOX, "before the first layer"),
        ("rope(remap=rerope(9000))", NEOX, "trained to 8192"),
        ("rope(remap=streaming(4, 8190))", NEOX, "trained to 8192"),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(asked, own, said):
    with pytest.raises(UserError, match=said):
        full(asked, own)


def test_force_takes_it_all_the_same():
    assert full("rope(pairs='adjacent')", NEOX, force=True) == [
        "rope(base=500000, fraction=0.25, pairs='adjacent')"
    ]
    assert full("alibi()", NEOX, force=True) == ["rope(base=500000, fraction=0.25) + alibi()"]
    assert "rerope(9000)" in full("rope(remap=rerope(9000))", NEOX, force=True)[0]
