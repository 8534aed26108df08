"""What a link says is what the page shows, and what it can't say is told in a sentence."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude.core.validate import UserError
from longitude.explorer.state import MAX_COLUMNS, MAX_LENGTH, Column, PageState, read_link

SIZES = st.integers(2, MAX_LENGTH)
REALS = st.one_of(st.none(), st.floats(1.01, 1e5))
# hypothesis would first sort all of Unicode into categories, which takes longer than the tests
TEXTS = st.text("aZ09&=?#%+;:,/\\'\"<>()[]_-é漢😀\u0301", max_size=40)
EACH = st.fixed_dictionaries(
    {
        "method": TEXTS.filter(bool),
        "base": REALS,
        "factor": REALS,
        "text": TEXTS,
        "layer": st.one_of(st.none(), st.integers(0, 999)),
    }
)
STATES = st.fixed_dictionaries(
    {
        "model": TEXTS,
        "own": TEXTS.filter(bool),
        "window": SIZES,
        "length": SIZES,
        "dim": st.integers(2, 1024),
        "heads": st.integers(1, 256),
    }
)


@settings(max_examples=40, deadline=None)
@given(STATES, st.lists(EACH, min_size=1, max_size=MAX_COLUMNS))
def test_a_link_carries_the_state(state: dict[str, Any], columns: list[dict[str, Any]]) -> None:
    asked = PageState(**state, columns=tuple(Column(**each) for each in columns))
    assert read_link(parse_qsl(asked.link)) == asked


def test_a_fresh_page_is_what_an_empty_link_says() -> None:
    assert read_link([]) == PageState()
    assert read_link([("length", "64")]) == PageState(length=64)
    assert read_link([("method2", "yarn")]).columns == (Column("yarn"),)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("lenght=5", "length"),
        ("length=ten", "whole number"),
        ("length=1", "from 2 to 10,000,000"),
        ("length=10000001", "from 2 to 10,000,000"),
        ("length=١٢", "whole number"),
        ("method1=yarn&base1=nan", "a number from 1.01"),
        ("method1=yarn&base1=-3", "a number from 1.01"),
        ("method1=yarn&factor1=1e99", "a number from 1 to 100000"),
        ("method1=written&text1=" + "x" * 5000, "5,000 characters"),
        ("dim=64&dim=64", "twice"),
        ("method4=yarn", "method"),
        ("model=a%0Ab", "on one line"),
    ],
)
def test_what_a_link_cant_say(query: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as told:
        read_link(parse_qsl(query))
    assert str(told.value).endswith(".") and "\n" not in str(told.value)


def test_the_stretch_reaches_the_length() -> None:
    for window, length in ((4096, 16384), (1000, 3333), (4096, 64)):
        asked = PageState(window=window, length=length)
        assert asked.stretch >= max(1, length / window) > asked.stretch - 0.0101
