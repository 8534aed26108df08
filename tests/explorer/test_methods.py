"""The methods of the page make the schemes that extend and the presets make."""

from __future__ import annotations

import pytest

from longitude import parse
from longitude.core.validate import UserError
from longitude.explorer.methods import base_of, choices, resolve, with_base
from longitude.explorer.state import Column, PageState
from longitude.extension.candidates import candidates
from longitude.hf.merge_scheme import merge_scheme
from longitude.presets import PRESETS

OWN = {
    "rope": "rope(base=50000, fraction=0.5)",
    "alibi": "alibi()",
    "learned": "learned(512)",
}


def names(own: str, group: str) -> list[str]:
    return [m["name"] for g in choices(own) if g["group"] == group for m in g["methods"]]


@pytest.mark.parametrize("own", OWN.values(), ids=list(OWN))
def test_ways_past_the_window_are_extends(own: str) -> None:
    asked = PageState(own=own, window=512, length=2048)
    ways = candidates("all", parse(own), 512, 2048)
    first = {c.name: c.text for c in reversed(ways) if c.text}  # the first of a name wins
    assert sorted(names(own, "Context extension")) == sorted(first)
    for name, text in first.items():
        found = resolve(Column(name), asked).scheme
        mine = parse(own)
        if mine.layer(0).embed:
            assert str(found) == text
        else:
            each = merge_scheme(text, [mine.layer(0)] * len(found), 512)
            assert [found.layer(n) for n in range(len(found))] == each


def test_every_choice_is_a_scheme_that_is_written_back() -> None:
    for group in choices("rope()"):
        for method in group["methods"]:
            if method["name"] != "written":
                scheme = resolve(Column(method["name"]), PageState()).scheme
                assert parse(str(scheme)) == scheme and method["what"]


def test_presets_take_the_pages_numbers() -> None:
    asked = PageState(window=2048)
    column = Column("yarn_llama", base=500_000, factor=8)
    assert resolve(column, asked).scheme == PRESETS["yarn_llama"](8.0, 2048, 500_000.0)
    assert resolve(Column("llama31"), asked).factor == 8  # its own, where none is given
    assert resolve(Column("nope"), asked).factor is None


def test_controls_say_what_they_move() -> None:
    asked = PageState(length=32768)
    assert resolve(Column("yarn"), asked).factor == 8
    assert resolve(Column("rerope"), asked).factor is None  # whose window is the model's alone
    assert resolve(Column("own"), asked).factor is None
    assert resolve(Column("linear", base=77), asked).base == 77
    assert str(resolve(Column("linear", base=77, factor=3), asked).scheme) == (
        "rope(base=77, frequencies=linear(3))"
    )


def test_a_base_moves_the_layers_that_see_everything() -> None:
    gemma = parse("layers(rope() + window(16), rope(base=1000000, frequencies=linear(8)))")
    assert base_of(gemma) == 1_000_000
    assert str(with_base(gemma, 5000)) == (
        "layers(rope() + window(16), rope(base=5000, frequencies=linear(8)))"
    )
    assert with_base(gemma, None) is gemma


def test_layers_with_a_window_keep_their_own() -> None:
    own = "layers(rope() + window(16), rope(base=1000000))"
    found = resolve(Column("yarn"), PageState(own=own, window=512, length=2048)).scheme
    assert str(found) == (
        "layers(rope() + window(16), rope(base=1000000, frequencies=yarn(4, original=512)))"
    )


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (Column("yarm"), "use yarn"),
        (Column("written", text="rope(base=0)"), "base"),
        (Column("written", text="shaw(1000000)"), "too large for the page"),
        (Column("longrope_phi3"), "write it out"),
        (Column("written", text=f"layers({', '.join(['rope()'] * 513)})"), "513 layers"),
    ],
)
def test_mistakes_are_told(column: Column, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(column, PageState())
