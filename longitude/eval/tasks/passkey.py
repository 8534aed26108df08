"""Passkey retrieval: a number stated once in a lot of garbage, asked for at the end.

Mohtashami & Jaggi 2023, "Landmark Attention", arXiv:2305.16300; the same prompt in PI and YaRN
(arXiv:2306.15595, arXiv:2309.00071). Five lines: the task, garbage, the key, garbage, the question;
each stretch of garbage starts afresh and ends wherever its last character falls.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from longitude.core.validate import UserError, shown
from longitude.eval.haystack import Count, Form, byte_count, checked_form, fit, question_metric
from longitude.eval.records import PASSKEY

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 50_000


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
    count: Count = byte_count,
) -> Passkey:
    """A passkey whose prompt and answer take `length` tokens, or as close below as possible.

    `rng` is a seed or a generator; without a `depth` one is drawn. `count` gives the tokens of a
    text: `lambda text: len(tokenizer(text).input_ids)`, special tokens included.
    """
    form = checked_form(form, length)
    if depth is not None and not 0 <= depth <= 1:
        raise UserError(
            f"a passkey's depth is a share from 0 to 1, but got {shown(depth)}: "
            f"use for example 0.5, the middle."
        )
    rng = random.Random(rng) if isinstance(rng, int) else rng
    key = rng.randint(1, LARGEST_KEY)
    depth = rng.random() if depth is None else depth

    # the longest key decides, so that a length never works for one draw and fails for the next
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
    most = len(garbage)
    before = min(int(depth * (most + 1)), most)  # a uniform depth: all places equally likely
    lines = [garbage[:before], KEY.format(key=key), garbage[: most - before], QUESTION]
    return "\n".join([TASK, *lines] if form == "landmark" else lines)


METRIC = question_metric(
    PASSKEY,
    passkey,
    retrieved,
    by_depth=True,
    title="Passkeys retrieved",
    paper="Mohtashami & Jaggi 2023, arXiv:2305.16300",
    help="A number hidden at some depth of a filler text is asked for at its end.",
    heading="passkeys",
    chart="The share of hidden numbers that the model retrieves.",
    order=30,
)
