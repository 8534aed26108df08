"""The passkey: a number said once somewhere in a lot of garbage, and asked for at the end.

Mohtashami & Jaggi 2023, "Landmark Attention", arXiv:2305.16300; the same prompt in PI and YaRN
(arXiv:2306.15595, arXiv:2309.00071). Five lines: what the task is, garbage, the key, garbage, the
question; each stretch of garbage starts afresh and ends wherever its last character falls. The
papers count garbage in characters. Here the length is given in tokens, prompt and answer together,
and the garbage fills it, so that "passkey at 4,096" means 4,096. The `short` form, for windows
under 1,024 tokens, leaves out the first line; results of the two forms are not comparable.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from longitude.fields import Mistake, shown

Form = Literal["landmark", "short"]

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
GARBAGE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST = 50_000
SHORT_BELOW = 1_024
SAMPLE = 4 * len(GARBAGE)  # characters from which the tokens a character takes are told
ROUNDS = 4  # corrections of the first guess
NEARBY = 32  # characters to either side of the last: cutting a word in two costs tokens


@dataclass(frozen=True)
class Passkey:
    """A prompt and what must follow it. `answer` starts with the space after the question."""

    prompt: str
    key: int
    depth: float  # where the key stands: 0 before all garbage, 1 after it
    form: Form
    tokens: int  # of prompt and answer, by the given count

    @property
    def answer(self) -> str:
        return f" {self.key}"


def bytes_of(text: str) -> int:
    """The count of a byte-level tokenizer."""
    return len(text.encode())


def form_for(length: int) -> Form:
    """The form that fits a window of this many tokens."""
    return "short" if length < SHORT_BELOW else "landmark"


def passkey(
    length: int,
    *,
    rng: random.Random | int,
    depth: float | None = None,
    form: Form | None = None,
    count: Callable[[str], int] = bytes_of,
) -> Passkey:
    """A passkey whose prompt and answer take `length` tokens, or as few less as can be.

    `rng` is a seed or a generator; `depth` is drawn where it is not given. `count` says how many
    tokens a text takes: `lambda text: len(tokenizer(text).input_ids)`, special tokens included.
    """
    form = form or form_for(length)
    _check(form, depth)
    rng = random.Random(rng) if isinstance(rng, int) else rng
    key = rng.randint(1, LARGEST)
    depth = rng.random() if depth is None else depth

    @cache  # a real tokenizer is slow on a long text
    def tokens(garbage: int) -> int:
        return count(f"{_prompt(form, key, garbage, depth)} {key}")

    # the longest key decides, so that a length never works for one draw and fails for the next
    least = max(tokens(0), count(f"{_prompt(form, LARGEST, 0, depth)} {LARGEST}"))
    if least > length:
        raise Mistake(
            f"a passkey takes at least {least} tokens in its {form} form, but got a length of "
            f"{length}: give {least} or more."
        )
    garbage = _garbage_for(tokens, length)
    return Passkey(_prompt(form, key, garbage, depth), key, depth, form, tokens(garbage))


def retrieved(asked: Passkey, continuation: str) -> bool:
    """Whether the first number that a model says is the key: the rule of the papers' code."""
    said = re.search("[0-9]+", continuation)
    return said is not None and said.group().lstrip("0") == str(asked.key)


def _check(form: str, depth: float | None) -> None:
    if form not in get_args(Form):
        raise Mistake(
            f"a passkey's form is 'landmark' or 'short', but got {shown(form)}: use one of them."
        )
    if depth is not None and not 0 <= depth <= 1:
        raise Mistake(
            f"a passkey's depth is a share from 0 to 1, but got {shown(depth)}: "
            f"use for example 0.5, the middle."
        )


def _prompt(form: str, key: int, garbage: int, depth: float) -> str:
    """The prompt with this many characters of garbage, before and after the key."""
    before = min(int(depth * (garbage + 1)), garbage)  # a uniform depth makes each place as likely
    endless = f"{GARBAGE} " * (garbage // len(GARBAGE) + 1)
    lines = [endless[:before], KEY.format(key=key), endless[: garbage - before], QUESTION]
    return "\n".join([TASK, *lines] if form == "landmark" else lines)


def _garbage_for(tokens: Callable[[int], int], length: int) -> int:
    """How many characters of garbage bring `tokens` to `length`, or as close below as can be.

    Garbage repeats, so its tokens grow with its characters at one rate, save for where it is cut.
    """
    rate = (tokens(SAMPLE) - tokens(0)) / SAMPLE
    if rate <= 0:
        raise Mistake(
            f"a passkey's count must grow with its text, but {SAMPLE} characters more made no "
            f"difference: turn the tokenizer's truncation off."
        )
    guess = 0
    for _ in range(ROUNDS):
        guess = max(0, guess + round((length - tokens(guess)) / rate))
    around = range(max(0, guess - NEARBY), guess + NEARBY + 1)
    near = sorted(around, key=lambda garbage: abs(garbage - guess))
    exact = next((garbage for garbage in near if tokens(garbage) == length), None)
    below = (garbage for garbage in [0, *near] if tokens(garbage) < length)
    return max(below, key=tokens) if exact is None else exact
