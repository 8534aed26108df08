"""Chains of assignments: following them leads to the names asked for, and to no others."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude import UserError
from longitude.eval.haystack import answered, filler
from longitude.eval.tasks.variables import variables
from tests.eval.test_passkey import pieces

many = settings(max_examples=50, deadline=None)
FACT = re.compile(r"Let ([A-Z]{5}) be ([A-Z]{5}|\d{5})\. ")


@many
@given(st.integers(500, 3000), st.integers(0, 2**40), st.integers(0, 4), st.integers(1, 3))
def test_running_the_assignments_gives_the_answer(n: int, seed: int, hops: int, kinds: int) -> None:
    made = variables(n, rng=seed, hops=hops, chains=kinds, form="short")
    assert len((made.prompt + made.answer).encode()) == made.tokens == n
    text, question = made.prompt.split("\n")
    held: dict[str, str] = {}
    for name, value in FACT.findall(text):
        assert name not in held
        held[name] = value if value.isdigit() else held[value]  # as a program, top to bottom
    assert len(held) == kinds * (hops + 1) and len(set(held.values())) == kinds
    asked = re.fullmatch(r"Which names hold (\d{5})\? The (\d+) names that hold \1 are", question)
    assert asked and int(asked[2]) == hops + 1
    assert set(made.answers) == {name for name, value in held.items() if value == asked[1]}
    rest = FACT.sub("", text)
    assert rest == filler(len(rest))


def test_the_form_says_the_task_and_takes_more_hops() -> None:
    short, whole = variables(1023, rng=0), variables(1024, rng=0)
    assert short.prompt.count("\n") == 1 and len(short.answers) == 3
    assert whole.prompt.startswith("Names are given values") and len(whole.answers) == 5


def test_chains_are_mixed() -> None:
    rng = random.Random(0)
    orders = set()
    for _ in range(120):
        made = variables(196, rng=rng)
        orders.add(tuple(name in made.answers for name, _ in FACT.findall(made.prompt)))
    assert len(orders) == 20, "every way to put three among six"


@many
@given(st.integers(150, 1500), st.integers(0, 99))
def test_any_tokenizers_length_is_met_closely(length: int, seed: int) -> None:
    made = variables(length, rng=seed, form="short", count=pieces)
    assert length - 1 <= made.tokens == pieces(made.prompt + made.answer) <= length


def test_the_same_seed_gives_the_same_question() -> None:
    assert variables(500, rng=3) == variables(500, rng=random.Random(3))
    assert variables(500, rng=3) != variables(500, rng=4)


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(UserError, match="2 chains of 2 hops in its short form takes at least 196"):
        variables(195, rng=0)
    assert variables(196, rng=0).tokens == 196
    with pytest.raises(UserError, match=r"1 chain or more.* but got 0 and 2"):
        variables(500, rng=0, chains=0)


def test_all_names_count_and_no_other() -> None:
    made = variables(600, rng=5)
    a, b, c = made.answers
    other = next(name for name, _ in FACT.findall(made.prompt) if name not in made.answers)
    assert answered(made, made.answer)
    assert answered(made, f" {c}, {a} and {a}, {b}. Let {other} be")
    assert not answered(made, f" {a}, {b}")
    assert not answered(made, f" {a}, {other}, {b}, {c}")
    assert not answered(made, f" {a}, {b}, {c}X")
    assert not answered(made, "")
