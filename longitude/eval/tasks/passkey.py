"""Passkey retrieval: a number stated once in a long text, asked for at the end.

Mohtashami & Jaggi 2023, "Landmark Attention", arXiv:2305.16300; the same prompt in PI and YaRN
(arXiv:2306.15595, arXiv:2309.00071), and RULER's first needle. `passkey` writes the papers' own
prompt, five lines: the task, garbage, the key, garbage, the question; it has an exact number of
tokens, where the papers count characters. The `short` form, for windows under 1,024 tokens, leaves
out the line that explains the task.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from typing import Literal, get_args

from longitude.core.validate import UserError, shown
from longitude.eval.records import PASSKEY
from longitude.eval.tasks import SMALL_WINDOW, Family, Prompt

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 50_000
GARBAGE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
PERIOD = len(GARBAGE) + 1  # with the space behind it
SAMPLE = 4 * len(GARBAGE)  # characters from which the rate of tokens per character is estimated
CORRECTIONS = 4  # of the first estimate
NEARBY = 32  # characters tried on either side of the estimate: a cut word takes more tokens

Count = Callable[[str], int]
Form = Literal["landmark", "short"]


def form_for(length: int) -> Form:
    """The form that fits a window of this many tokens."""
    return "short" if length < SMALL_WINDOW else "landmark"


def filler(characters: int) -> str:
    return (f"{GARBAGE} " * (characters // PERIOD + 1))[:characters]


def fit(
    write: Callable[[str], str], length: int, count: Count, what: str, *, least: int = 0
) -> tuple[str, int]:
    """The filler that brings a text to `length` tokens, or as close below as possible; and the
    number of tokens that the text then has.

    Args:
        write: builds the text around a filler.
        what: what the text is, for the error message.
        least: the smallest length to accept, where that is more than this text needs.
    """

    @cache  # a real tokenizer is slow on a long text
    def tokens(characters: int) -> int:
        return count(write(filler(characters)))

    least = max(least, tokens(0))
    if least > length:
        raise UserError(
            f"{what} takes at least {least} tokens, but got a length of {length}: give {least} or "
            f"more."
        )
    rate = (tokens(SAMPLE) - tokens(0)) / SAMPLE
    if rate <= 0:
        raise UserError(
            f"the count of {what} must grow with its text, but {SAMPLE} characters more made no "
            f"difference: turn the tokenizer's truncation off."
        )
    guess = 0
    for _ in range(CORRECTIONS):
        guess = max(0, guess + round((length - tokens(guess)) / rate))
    around = range(max(0, guess - NEARBY), guess + NEARBY + 1)
    near = sorted(around, key=lambda characters: abs(characters - guess))
    exact = next((n for n in near if tokens(n) == length), None)
    below = (n for n in [0, *near] if tokens(n) < length)
    chosen = max(below, key=tokens) if exact is None else exact
    return filler(chosen), tokens(chosen)


@dataclass(frozen=True)
class Passkey:
    """A prompt and what must follow it. `answer` starts with the space after the question."""

    prompt: str
    key: int
    depth: float  # where the key is: 0 before all garbage, 1 after it
    form: Form
    tokens: int  # of prompt and answer, by the given count

    @property
    def answer(self) -> str:
        return f" {self.key}"


def passkey(
    length: int,
    *,
    rng: random.Random | int,
    depth: float | None = None,
    form: Form | None = None,
    count: Count = lambda text: len(text.encode()),
) -> Passkey:
    """A passkey whose prompt and answer take `length` tokens, or as close below as possible.

    `rng` is a seed or a generator; without a `depth` one is drawn. `count` gives the tokens of a
    text: `lambda text: len(tokenizer(text).input_ids)`, special tokens included; by default bytes.
    """
    if form is not None and form not in get_args(Form):
        raise UserError(
            f"a prompt's form is 'landmark' or 'short', but got {shown(form)}: use one of them."
        )
    form = form or form_for(length)
    if depth is not None and not 0 <= depth <= 1:
        raise UserError(
            f"a passkey's depth is a share from 0 to 1, but got {shown(depth)}: "
            f"use for example 0.5, the middle."
        )
    rng = random.Random(rng) if isinstance(rng, int) else rng
    key = rng.randint(1, LARGEST_KEY)
    depth = rng.random() if depth is None else depth

    # checked with the longest key, so that no length works for one draw and fails for another
    least = count(f"{_prompt(form, LARGEST_KEY, '', depth)} {LARGEST_KEY}")
    garbage, tokens = fit(
        lambda garbage: f"{_prompt(form, key, garbage, depth)} {key}",
        length,
        count,
        f"a passkey in its {form} form",
        least=least,
    )
    return Passkey(_prompt(form, key, garbage, depth), key, depth, form, tokens)


def retrieved(question: Passkey, continuation: str) -> bool:
    """Whether the first number of the continuation is the key: the rule of the papers' code."""
    number = re.search("[0-9]+", continuation)
    return number is not None and number.group().lstrip("0") == str(question.key)


def _prompt(form: str, key: int, garbage: str, depth: float) -> str:
    """The prompt with this garbage, before and after the key."""
    size = len(garbage)
    before = min(int(depth * (size + 1)), size)  # a uniform depth makes all places equally likely
    lines = [garbage[:before], KEY.format(key=key), garbage[: size - before], QUESTION]
    return "\n".join([TASK, *lines] if form == "landmark" else lines)


def write(rng: random.Random, small: bool) -> Prompt:
    """One key and the question for it."""
    key = rng.randint(10_000, LARGEST_KEY)
    sentences = cycle(re.findall(r".*?\. ?", f"{GARBAGE} "))
    return Prompt([(QUESTION, str(key))], [f"{KEY.format(key=key)}\n"], sentences)


FAMILY = Family(
    PASSKEY,
    "Pass key",
    "A number is stated once in the text, and asked for at its end.",
    write,
    "Mohtashami & Jaggi 2023, arXiv:2305.16300",
)
