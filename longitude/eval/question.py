"""A question about facts that stand scattered in filler: retrieval beyond one key.

After RULER (Hsieh et al. 2024, arXiv:2404.06654), with sentences of our own. As for the passkey,
the length is in tokens, prompt and answer together, and filler makes it up. Facts stand between two
sentences of the filler, in the order given. The `short` form, for windows under 1,024 tokens,
leaves out the line that says what the task is; results of the two forms are not comparable.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from longitude.eval.haystack import GARBAGE, PERIOD, Count, fit
from longitude.eval.tasks.passkey import Form

# where a sentence of the filler can begin
STARTS = (0, *(found.end() for found in re.finditer(r"\. ", f"{GARBAGE} ")))[:-1]


@dataclass(frozen=True)
class Question:
    """A prompt and what must follow it; `kind` is how a word that could be an answer is written."""

    prompt: str
    answers: tuple[str, ...]
    tokens: int  # of prompt and answer, by the given count
    kind: str = r"\w+"

    @property
    def answer(self) -> str:
        """The answers as one would say them, with the space after the question."""
        return " " + ", ".join(self.answers)


def answered(question: Question, continuation: str) -> bool:
    """Whether the first words of the asked kind are the answers, in any order: a model that goes on
    to tell other facts is right, and one that tells all the facts it saw is not."""
    told = dict.fromkeys(re.findall(question.kind, continuation))
    return set(list(told)[: len(question.answers)]) == set(question.answers)


def numbers(rng: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(number) for number in rng.sample(range(10_000, 100_000), count)]


def ask(
    facts: Sequence[str],
    question: str,
    answers: Sequence[str],
    *,
    length: int,
    rng: random.Random,
    count: Count,
    form: Form,
    task: str,
    kind: str,
    what: str,
) -> Question:
    """The facts at random places in as much filler as brings the whole to `length` tokens."""
    places = sorted(rng.random() for _ in facts)
    answer = Question("", tuple(answers), 0).answer

    def prompt(garbage: str) -> str:
        lines = [woven(facts, places, garbage), question]
        return "\n".join([task, *lines] if form == "landmark" else lines)

    what = f"{what} in its {form} form"
    garbage, tokens = fit(lambda garbage: prompt(garbage) + answer, length, count, what)
    return Question(prompt(garbage), tuple(answers), tokens, kind)


def woven(facts: Sequence[str], places: Sequence[float], garbage: str) -> str:
    """The filler, with each fact where a sentence begins: at place 0 the first, at place 1 the
    last, any other as likely."""
    starts = _starts(len(garbage))
    at = [_start(min(int(place * starts), starts - 1)) for place in places]
    stretches = [garbage[a:b] for a, b in pairwise([0, *at, len(garbage)])]
    return stretches[0] + "".join(
        f"{fact} {after}" for fact, after in zip(facts, stretches[1:], strict=True)
    )


def _starts(characters: int) -> int:
    """How many sentences can begin in, or right behind, so many characters of filler."""
    whole, rest = divmod(characters, PERIOD)
    return whole * len(STARTS) + sum(start <= rest for start in STARTS)


def _start(index: int) -> int:
    """Where a sentence of the filler begins."""
    whole, rest = divmod(index, len(STARTS))
    return whole * PERIOD + STARTS[rest]
