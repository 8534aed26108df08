"""The passkey: the papers' prompt, letter by letter, at exactly the length asked for."""

import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longitude import UserError
from longitude.eval.tasks.passkey import Form, Passkey, form_for, passkey, retrieved

many = settings(max_examples=60, deadline=None)
forms = st.sampled_from(["short", "landmark"])


def papers_prompt(form: str, key: int, before: int, after: int) -> str:
    """As the code of Landmark Attention and YaRN builds it, from characters of garbage."""
    lines = [
        "There is an important info hidden inside a lot of irrelevant text. "
        "Find it and memorize them. I will quiz you about the important information there.",
        " ".join(
            [
                "The grass is green. The sky is blue. The sun is yellow. Here we go. "
                "There and back again."
            ]
            * 5000
        )[:before],
        f"The pass key is {key}. Remember it. {key} is the pass key.",
        " ".join(
            [
                "The grass is green. The sky is blue. The sun is yellow. Here we go. "
                "There and back again."
            ]
            * 5000
        )[:after],
        "What is the pass key? The pass key is",
    ]
    return "\n".join(lines if form == "landmark" else lines[1:])


def pieces(text: str) -> int:
    """A tokenizer's count that does not only grow: a word of up to five letters is one piece,
    unless it ends the text or its line; others are cut in twos."""
    words = re.findall(r" ?\w+(?= |\.)|\w|[^\w]", text)
    return sum(1 if len(word) < 7 else math.ceil(len(word) / 2) for word in words)


@many
@given(forms, st.integers(300, 3000), st.floats(0, 1) | st.none(), st.integers(0, 2**40))
def test_it_is_the_papers_prompt_and_fills_the_length(
    form: Form, length: int, depth: float | None, seed: int
) -> None:
    made = passkey(length, rng=seed, depth=depth, form=form)
    assert len((made.prompt + made.answer).encode()) == made.tokens == length
    garbage = len(made.prompt) - len(papers_prompt(form, made.key, 0, 0))
    before = made.prompt.index("The pass key is") - len(
        papers_prompt(form, 1, 0, 0).split("The pass")[0]
    )
    assert made.prompt == papers_prompt(form, made.key, before, garbage - before)
    assert abs(before - made.depth * garbage) <= 1
    assert depth is None or made.depth == depth
    assert 1 <= made.key <= 50_000 and made.answer == f" {made.key}"


def test_keys_and_depths_are_drawn_evenly() -> None:
    rng = random.Random(1)
    made = [passkey(200, rng=rng) for _ in range(4000)]
    for drawn, most in (([p.key for p in made], 50_000), ([p.depth for p in made], 1)):
        quarters = [sum(q <= 4 * x / most < q + 1 for x in drawn) for q in range(4)]
        assert min(quarters) > 850, "1000 each, more than five deviations off"
    assert len({(p.key, p.depth) for p in made}) == len(made)


def test_every_place_is_as_likely() -> None:
    """With one character of garbage there are two places for the key, one draw in two each."""
    rng = random.Random(2)
    made = [passkey(105, rng=rng, form="short") for _ in range(2000)]
    first = [p.prompt.startswith("\n") for p in made if p.key >= 10_000]
    assert 0.44 < sum(first) / len(first) < 0.56


def test_the_ends_of_depth() -> None:
    first, last = (passkey(400, rng=0, depth=depth).prompt.split("\n") for depth in (0, 1))
    assert first[0] == last[2] == ""
    assert first[2] == last[0] and first[2].startswith("The grass is green.")
    assert first[1] == last[1]


def test_the_same_seed_gives_the_same_passkey() -> None:
    assert passkey(500, rng=3) == passkey(500, rng=3) == passkey(500, rng=random.Random(3))
    assert passkey(500, rng=3) != passkey(500, rng=4)
    state = random.getstate()
    passkey(500, rng=3)
    assert random.getstate() == state, "the global generator is left alone"


@many
@given(st.integers(80, 2000), st.integers(0, 99), st.floats(0, 1))
def test_any_tokenizers_length_is_met_closely(length: int, seed: int, depth: float) -> None:
    made = passkey(length, rng=seed, depth=depth, form="short", count=pieces)
    assert made.tokens == pieces(made.prompt + made.answer)
    assert length - 1 <= made.tokens <= length


def test_special_tokens_are_counted() -> None:
    made = passkey(300, rng=0, count=lambda text: len(text) + 7)
    assert len(made.prompt + made.answer) == 293


def test_a_length_that_can_not_be_met_is_stayed_below() -> None:
    made = passkey(601, rng=0, count=lambda text: 2 * len(text))
    assert made.tokens == 2 * len(made.prompt + made.answer) == 600


def test_a_long_text_takes_few_counts() -> None:
    asked: list[int] = []

    def count(text: str) -> int:
        asked.append(len(text))
        return pieces(text)

    made = passkey(20_000, rng=0, count=count)
    assert 19_998 <= made.tokens <= 20_000
    assert len(asked) < 30


def test_the_form_follows_the_window() -> None:
    assert [form_for(n) for n in (128, 1023, 1024, 10**6)] == ["short"] * 2 + ["landmark"] * 2
    assert passkey(1023, rng=0).form == "short"
    assert passkey(1024, rng=0).prompt.startswith("There is an important info")


@pytest.mark.parametrize(("form", "least"), [("short", 104), ("landmark", 253)])
def test_a_length_too_small_is_told_whatever_the_key(form: Form, least: int) -> None:
    longest = papers_prompt(form, 50_000, 0, 0) + " 50000"
    assert len(longest) == least
    for seed in range(30):
        assert passkey(least, rng=seed, form=form).tokens == least
        with pytest.raises(
            UserError, match=rf"in its {form} form takes at least {least} tokens.* {least - 1}"
        ):
            passkey(least - 1, rng=seed, form=form)


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(UserError, match=r"share from 0 to 1, but got 1\.5"):
        passkey(500, rng=0, depth=1.5)
    with pytest.raises(UserError, match="share from 0 to 1, but got nan"):
        passkey(500, rng=0, depth=math.nan)
    with pytest.raises(UserError, match="truncation off"):
        passkey(500, rng=0, count=lambda text: min(len(text), 100))


@pytest.mark.parametrize(
    ("continuation", "right"),
    [
        (" 1234.", True),
        (" 1234", True),
        ("1234 is the pass key", True),
        (":\n**1234**", True),
        (" 01234", True),  # the papers compare numbers
        (" 12345", False),
        (" 123", False),
        (" 7 or 1234", False),
        (" not known", False),
        ("", False),
    ],
)
def test_the_first_number_decides(continuation: str, right: bool) -> None:
    asked = Passkey("…", 1234, 0.5, "short", 1)
    assert retrieved(asked, continuation) is right
