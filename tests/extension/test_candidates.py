"""Windows, factors and groups keep the rules of their papers, whatever the stretch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude.core.lengths import Lengths
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.extension.candidates import (
    FAMILIES,
    Candidate,
    by_length,
    candidates,
    family,
    full_layers,
    label,
)
from longitude.hf.merge_scheme import as_layers, merge_scheme
from longitude.parts import SelfExtend

ROPE, ALIBI, LEARNED = parse("rope(base=5000)"), parse("alibi()"), parse("learned(512)")


def part(text, name):
    """The remap or frequencies of this name that a text holds."""
    rope = parse(text).rotary
    found = [p for p in (rope.remap, rope.frequencies) if p is not None and p.name == name]
    return found[0] if found else None


@settings(max_examples=60, deadline=None)
@given(st.integers(64, 200_000), st.floats(1.05, 64))
def test_every_rule_holds_at_every_stretch(trained, times):
    target = int(trained * times) + 1
    found = {c.name: c.text for c in reversed(candidates("auto", ROPE, trained, target))}
    leaky = part(found["leaky_rerope"], "leaky_rerope")
    assert leaky.window + (target - 1 - leaky.window) / leaky.factor <= 3 / 4 * trained
    assert part(found["rerope"], "rerope").window <= trained / 2
    extend = part(found["self_extend"], "self_extend")
    assert extend.window + (target - extend.window) / extend.group <= 2 / 3 * trained + 1
    assert target <= (trained - extend.window) * extend.group + extend.window
    chunk = part(found["dual_chunk"], "dual_chunk")
    assert chunk.size <= trained and chunk.local <= chunk.size
    stream = part(found["streaming"], "streaming")
    assert stream.sinks + stream.window <= trained
    for name in ("linear", "ntk", "yarn"):
        factor = part(found[name], name).factor
        assert target / trained <= factor < target / trained + 0.011
    assert part(found["yarn"], "yarn").original == trained


@pytest.mark.parametrize("own", [ROPE, ALIBI, LEARNED], ids=str)
@pytest.mark.parametrize("methods", ["auto", "all"])
def test_all_are_schemes_and_change_nothing_comes_first(own, methods):
    found = candidates(methods, own, 512, 4096)
    assert found[0].text is None
    assert len({c.text for c in found}) == len(found)
    for one in found[1:]:
        assert parse(one.text) != own


def test_all_is_more_than_auto():
    auto, every = (candidates(m, ROPE, 512, 4096) for m in ("auto", "all"))
    assert {c.text for c in auto} < {c.text for c in every}
    assert set(FAMILIES) == {family(one) for one in (ROPE, ALIBI, LEARNED, parse("drope(512)"))}


def test_names_and_schemes_mix():
    found = candidates("yarn; rope(remap=rerope(99)); none", ROPE, 512, 4096)
    texts = [c.text for c in found]
    assert texts[0] is None
    assert [c.name for c in found[1:3]] == ["yarn", "yarn"]
    assert texts[-1] == "rope(remap=rerope(99))"


@pytest.mark.parametrize("name", ["auto", "all"])
def test_a_label_of_the_table_names_its_method(name):
    """What is copied from the table gives the very scheme that it stands for."""
    for candidate in candidates(name, ROPE, 256, 2048)[1:]:
        full = as_layers(merge_scheme(candidate.text, [ROPE] * 4, 256), parse(candidate.text))
        _, again = candidates(label(full, ROPE), ROPE, 256, 2048)
        assert as_layers(merge_scheme(again.text, [ROPE] * 4, 256), parse(again.text)) == full


def test_what_a_scheme_writes_out_stays_written():
    (_, one), (_, other) = (candidates(m, ROPE, 512, 4096) for m in ("rope(base=10000)", "rope()"))
    assert (one.text, other.text) == ("rope(base=10000)", "rope()")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match=r"'yran'.*yarn"):
        candidates("yran", ROPE, 512, 4096)
    with pytest.raises(UserError, match="names none"):
        candidates(" ; ", ROPE, 512, 4096)
    with pytest.raises(UserError, match="ntk_alibi"):
        candidates("ntk_alib", ALIBI, 512, 4096)


def test_layers_with_windows_of_their_own_stay():
    own = parse("layers(rope() + window(16), rope())")
    text = full_layers("rope(remap=rerope(128))", own)
    assert parse(text) == parse("layers(rope() + window(16), rope(remap=rerope(128)))")
    assert full_layers("rope(remap=rerope(128))", ROPE) == "rope(remap=rerope(128))"


SPLIT = "split(streaming(4, 28), rerope(16), share=0.5)"


def test_a_split_is_tried_on_every_rotary_model():
    named = {c.name: c.text for c in candidates("auto", ROPE, 8192, 32768)}
    assert named["split"] == "split(streaming(4, 4092), rerope(1024), share=0.5)"
    assert candidates("split", ROPE, 256, 2048)[1:] == [
        Candidate("split", "split(streaming(4, 124), rerope(64), share=0.5)")
    ]
    assert "split" not in {c.name for c in candidates("all", ALIBI, 512, 2048)}
    for trained in (8, 20, 100):  # windows stay inside
        assert len(
            merge_scheme(candidates("split", ROPE, trained, 999)[1].text, 2 * [ROPE], trained)
        )


def test_a_split_counts_the_layers_that_see_the_full_context():
    local, full = "rope(base=7) + window(16)", "rope(base=5000)"
    own = parse(f"layers({local}, {full}, {local}, {full}, {full})")
    near, far = "rope(remap=streaming(4, 28))", "rope(remap=rerope(16))"
    assert full_layers(SPLIT, own) == f"layers({local}, {near}, {local}, {near}, {far})"
    assert full_layers(SPLIT, ROPE) == SPLIT


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("rope(base=5000)", "baseline"),
        ("rope(base=5000, remap=rerope(64)) + logn(128)", "rerope(64) + logn(128)"),
        ("rope(base=7000)", "base=7000"),
        ("rope(base=5000, frequencies=linear(4))", "linear(4)"),
        ("rope(base=9000, frequencies=linear(4))", "base=9000 + linear(4)"),
        ("layers(rope(base=5000, remap=rerope(64)), rope(base=5000))", "rerope(64)"),
        (
            "split(rope(base=5000, remap=streaming(4, 28)), rope(base=5000, remap=rerope(16)))",
            SPLIT,
        ),
    ],
)
def test_a_label_tells_what_changes(text, want):
    assert label(parse(text), ROPE) == want


def test_only_dynamic_frequencies_depend_on_the_length():
    found = {c.text: by_length(parse(c.text)) for c in candidates("all", ROPE, 512, 2048)[1:]}
    assert {text for text, dynamic in found.items() if dynamic} == {
        t for t in found if "dynamic_" in t
    }


def test_the_group_is_the_smallest_power_of_two_that_keeps_the_rule():
    for trained, target in ((256, 2048), (8192, 32768), (4096, 131072)):
        (one,) = SelfExtend.candidates(Lengths(trained, target))
        half = one.group // 2
        assert one.group & (one.group - 1) == 0
        assert half < 2 or one.window + (target - one.window) / half > 2 / 3 * trained
