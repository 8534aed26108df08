"""Several keys in filler: what is asked for stands there once, and only it is right."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude import UserError
from longitude.eval.haystack import GARBAGE, Question, answered, filler, interleave
from longitude.eval.tasks.multikey import WORDS, keys
from tests.eval.test_passkey import pieces

many = settings(max_examples=50, deadline=None)
FACT = re.compile(r"The number of the (\w+) is (\d{5})\. ")


def left(text: str, facts: re.Pattern[str]) -> str:
    """A text without its facts."""
    return facts.sub("", text)


@many
@given(st.integers(400, 3000), st.integers(0, 2**40), st.integers(1, 5))
def test_the_facts_are_there_and_filler_makes_up_the_length(n: int, seed: int, count: int) -> None:
    made = keys(n, rng=seed, keys=count)
    assert len((made.prompt + made.answer).encode()) == made.tokens == n
    *task, text, question = made.prompt.split("\n")
    facts = FACT.findall(text)
    assert len(dict(facts)) == len(facts) == count and len({v for _, v in facts}) == count
    assert left(text, FACT) == filler(len(left(text, FACT)))
    asked = re.fullmatch(r"What is the number of the (\w+)\? The number of the \1 is", question)
    assert asked and made.answers == (dict(facts)[asked[1]],)
    assert len(task) == (n >= 1024)


def test_facts_stand_between_sentences_and_everywhere() -> None:
    rng = random.Random(0)
    made = [keys(1500, rng=rng).prompt.split("\n")[1] for _ in range(150)]
    before = [left(text[: found.start()], FACT) for text in made for found in FACT.finditer(text)]
    assert all(text == "" or text.endswith(". ") for text in before)
    most = max(len(text) for text in before)
    quarters = [sum(q <= 4 * len(text) / (most + 1) < q + 1 for text in before) for q in range(4)]
    assert min(quarters) > 105, "150 each, four deviations off"


def test_each_key_is_asked_for_as_often() -> None:
    rng, places = random.Random(1), [0] * 4
    for _ in range(400):
        made = keys(202, rng=rng)
        places[[value for _, value in FACT.findall(made.prompt)].index(made.answers[0])] += 1
    assert min(places) > 60, "100 each, more than four deviations off"


@many
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 400))
def test_weaving_keeps_filler_and_order(places: list[float], characters: int) -> None:
    facts = [f"#{i}." for i in range(len(places))]
    text = interleave(facts, sorted(places), filler(characters))
    assert re.findall(r"#\d\.", text) == facts
    assert re.sub(r"#\d\. ", "", text) == filler(characters)


def test_weaving_reaches_both_ends() -> None:
    whole = len(GARBAGE) + 1
    assert interleave(["A.", "B."], [0, 1], filler(whole)) == f"A. {GARBAGE} B. "
    assert interleave(["A."], [0.5], "") == "A. "


@many
@given(st.integers(120, 1500), st.integers(0, 99))
def test_any_tokenizers_length_is_met_closely(length: int, seed: int) -> None:
    made = keys(length, rng=seed, form="short", count=pieces)
    assert made.tokens == pieces(made.prompt + made.answer)
    assert length - 1 <= made.tokens <= length


def test_the_same_seed_gives_the_same_question() -> None:
    assert keys(500, rng=3) == keys(500, rng=3) == keys(500, rng=random.Random(3))
    assert keys(500, rng=3) != keys(500, rng=4)


def test_a_length_that_holds_one_draw_holds_any() -> None:
    assert {len(word) for word in WORDS} == {5} and len(set(WORDS)) == len(WORDS)
    for seed in range(30):
        assert keys(202, rng=seed).tokens == 202
        with pytest.raises(UserError, match=r"4 keys in its short form .* 202 tokens.* of 201"):
            keys(201, rng=seed)


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(UserError, match="1 to 32 keys, but got 33"):
        keys(5000, rng=0, keys=33)
    with pytest.raises(UserError, match="truncation off"):
        keys(500, rng=0, count=lambda text: min(len(text), 100))


@pytest.mark.parametrize(
    ("continuation", "right"),
    [
        (" 12345.", True),
        (" 12345. The number of the crown is 54321.", True),
        ("… the number 12345", True),
        (" 54321 or 12345", False),
        (" 123456", False),
        (" 1234", False),
        ("", False),
    ],
)
def test_the_first_number_decides(continuation: str, right: bool) -> None:
    assert answered(Question("…", ("12345",), 1, "[0-9]+"), continuation) is right
