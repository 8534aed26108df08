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
from dataclasses import dataclass
from typing import Literal, get_args

from longitude.core.validate import UserError, shown
from longitude.eval.haystack import Count, bytes_of, fit

Form = Literal["landmark", "short"]

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
LARGEST = 50_000
SHORT_BELOW = 1_024


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


def form_for(length: int) -> Form:
    """The form that fits a window of this many tokens."""
    return "short" if length < SHORT_BELOW else "landmark"


def form_of(asked: Form | None, length: int) -> Form:
    """The form asked for; without one, that which fits the length."""
    if asked is not None and asked not in get_args(Form):
        raise UserError(
            f"a prompt's form is 'landmark' or 'short', but got {shown(asked)}: use one of them."
        )
    return asked or form_for(length)


def passkey(
    length: int,
    *,
    rng: random.Random | int,
    depth: float | None = None,
    form: Form | None = None,
    count: Count = bytes_of,
) -> Passkey:
    """A passkey whose prompt and answer take `length` tokens, or as few less as can be.

    `rng` is a seed or a generator; `depth` is drawn where it is not given. `count` says how many
    tokens a text takes: `lambda text: len(tokenizer(text).input_ids)`, special tokens included.
    """
    form = form_of(form, length)
    _check(depth)
    rng = random.Random(rng) if isinstance(rng, int) else rng
    key = rng.randint(1, LARGEST)
    depth = rng.random() if depth is None else depth

    # the longest key decides, so that a length never works for one draw and fails for the next
    least = count(f"{_prompt(form, LARGEST, '', depth)} {LARGEST}")
    garbage, tokens = fit(
        lambda garbage: f"{_prompt(form, key, garbage, depth)} {key}",
        length,
        count,
        f"a passkey in its {form} form",
        least=least,
    )
    return Passkey(_prompt(form, key, garbage, depth), key, depth, form, tokens)


def retrieved(asked: Passkey, continuation: str) -> bool:
    """Whether the first number that a model says is the key: the rule of the papers' code."""
    said = re.search("[0-9]+", continuation)
    return said is not None and said.group().lstrip("0") == str(asked.key)


def _check(depth: float | None) -> None:
    if depth is not None and not 0 <= depth <= 1:
        raise UserError(
            f"a passkey's depth is a share from 0 to 1, but got {shown(depth)}: "
            f"use for example 0.5, the middle."
        )


def _prompt(form: str, key: int, garbage: str, depth: float) -> str:
    """The prompt with as many characters of garbage, before and after the key."""
    most = len(garbage)
    before = min(int(depth * (most + 1)), most)  # a uniform depth makes each place as likely
    lines = [garbage[:before], KEY.format(key=key), garbage[: most - before], QUESTION]
    return "\n".join([TASK, *lines] if form == "landmark" else lines)
