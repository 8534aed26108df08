"""Retrieval questions in filler text: facts placed in a haystack, a question at its end.

The haystack of the passkey papers (arXiv:2305.16300), brought to an exact number of tokens: the
papers count filler in characters, here "at 4,096" means 4,096 tokens, prompt and answer together.
Facts stand between two sentences of the filler, in the order given, as in RULER (Hsieh et al. 2024,
arXiv:2404.06654). The `short` form, for windows under 1,024 tokens, leaves out the line that
explains the task; results of the two forms are not comparable.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args

from longitude.core.validate import UserError, shown
from longitude.eval.records import ResultKey
from longitude.eval.stats import matched, share
from longitude.eval.tasks import EvalProtocol, Metric, Session, Value, percent

GARBAGE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
PERIOD = len(GARBAGE) + 1  # with the space behind it
SENTENCE_STARTS = (0, *(found.end() for found in re.finditer(r"\. ", f"{GARBAGE} ")))[:-1]
SAMPLE = 4 * len(GARBAGE)  # characters from which the rate of tokens per character is estimated
CORRECTIONS = 4  # of the first estimate
NEARBY = 32  # characters to either side of the last: cutting a word in two costs tokens
SHORT_BELOW = 1_024
SPARE_TOKENS = 2  # decoded beyond an answer's own

Count = Callable[[str], int]
Form = Literal["landmark", "short"]


def byte_count(text: str) -> int:
    """The count of a byte-level tokenizer."""
    return len(text.encode())


def form_for(length: int) -> Form:
    """The form that fits a window of this many tokens."""
    return "short" if length < SHORT_BELOW else "landmark"


def checked_form(form: Form | None, length: int) -> Form:
    """The given form; without one, that which fits the length."""
    if form is not None and form not in get_args(Form):
        raise UserError(
            f"a prompt's form is 'landmark' or 'short', but got {shown(form)}: use one of them."
        )
    return form or form_for(length)


# filler


def filler(characters: int) -> str:
    """The garbage, repeated."""
    return (f"{GARBAGE} " * (characters // PERIOD + 1))[:characters]


def fit(
    write: Callable[[str], str], length: int, count: Count, what: str, *, least: int = 0
) -> tuple[str, int]:
    """The filler that brings a text to `length` tokens, or as close below as possible; and the
    number of tokens that the text then has.

    Args:
        write: the text with this filler.
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


# questions


@dataclass(frozen=True)
class Question:
    """A prompt and the answers that must follow it; `pattern` matches a word that could be one."""

    prompt: str
    answers: tuple[str, ...]
    tokens: int  # of prompt and answer, by the given count
    pattern: str = r"\w+"

    @property
    def answer(self) -> str:
        """The expected continuation, with the space after the question."""
        return " " + ", ".join(self.answers)


def answered(question: Question, continuation: str) -> bool:
    """Whether the first words that match are the answers, in any order: a model that goes on to
    state other facts is right, and one that states every fact it saw is not."""
    words = dict.fromkeys(re.findall(question.pattern, continuation))
    return set(list(words)[: len(question.answers)]) == set(question.answers)


def five_digits(rng: random.Random, count: int) -> list[str]:
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
    pattern: str,
    what: str,
) -> Question:
    """The facts at random places in as much filler as brings the prompt to `length` tokens."""
    places = sorted(rng.random() for _ in facts)
    answer = Question("", tuple(answers), 0).answer

    def prompt(garbage: str) -> str:
        lines = [interleave(facts, places, garbage), question]
        return "\n".join([task, *lines] if form == "landmark" else lines)

    what = f"{what} in its {form} form"
    garbage, tokens = fit(lambda garbage: prompt(garbage) + answer, length, count, what)
    return Question(prompt(garbage), tuple(answers), tokens, pattern)


def interleave(facts: Sequence[str], places: Sequence[float], garbage: str) -> str:
    """The filler, with each fact where a sentence begins: at place 0 the first, at place 1 the
    last, all equally likely."""
    periods, rest = divmod(len(garbage), PERIOD)
    starts = periods * len(SENTENCE_STARTS) + sum(start <= rest for start in SENTENCE_STARTS)
    at = []
    for place in places:
        periods, rest = divmod(min(int(place * starts), starts - 1), len(SENTENCE_STARTS))
        at.append(periods * PERIOD + SENTENCE_STARTS[rest])
    pieces = [garbage[a:b] for a, b in pairwise([0, *at, len(garbage)])]
    return pieces[0] + "".join(
        f"{fact} {after}" for fact, after in zip(facts, pieces[1:], strict=True)
    )


# the metric


def question_metric(
    name: str,
    question: Callable[..., Any],
    correct: Callable[[Any, str], bool],
    *,
    by_depth: bool = False,
    **more: Any,
) -> Metric:
    """A metric of right and wrong answers: `question(length, rng=, form=, count=)` makes one, with
    `depth=` where there is a row for each depth; `correct` judges what the model continues with."""

    def settings(protocol: EvalProtocol) -> Value:
        count = protocol.questions * (1 if by_depth else len(protocol.depths))
        return {"questions": count, "form": protocol.form}

    def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
        return _measure(session, keys, question, correct)

    return Metric(
        name=name,
        unit="share",
        better="higher",
        measure=measure,
        summarise=share,
        difference=matched,
        field="right",
        settings=settings,
        grid=lambda protocol: [{"depth": d} for d in protocol.depths] if by_depth else [{}],
        format=percent,
        **more,
    )


def _measure(
    session: Session,
    keys: Sequence[ResultKey],
    question: Callable[..., Any],
    correct: Callable[[Any, str], bool],
) -> list[Value]:
    """The answers of each row; those of a length run as one batch, never past the length, where a
    table of positions may end."""
    import torch

    from longitude.eval.prefill import greedy_batch

    def ids(text: str) -> list[int]:
        return session.tokenizer(text, verbose=False).input_ids

    def questions(key: ResultKey) -> list[Any]:
        at = "".join(f" {value:g}" for value in key.at.values())
        cell = f"{key.measure} {key.seed} {key.length}{at}"
        known = (cell, *key.protocol.items())  # the same for every method, and slow to fit
        if known not in session.cache:
            session.cache[known] = [
                question(
                    key.length,
                    rng=random.Random(f"{cell} {index}"),
                    form=key.protocol["form"],
                    count=lambda text: len(ids(text)),
                    **key.at,
                )
                for index in range(key.protocol["questions"])
            ]
        return session.cache[known]

    rows = [questions(key) for key in keys]
    every = [one for row in rows for one in row]
    prompts = [torch.tensor(ids(one.prompt)) for one in every]
    most = max(len(ids(one.answer)) for one in every) + SPARE_TOKENS
    replies: dict[int, list[int]] = {}
    for size in {len(prompt) for prompt in prompts}:
        which = [i for i, prompt in enumerate(prompts) if len(prompt) == size]
        new = min(most, keys[0].length - size + 1)
        tokens = greedy_batch(session.model, [prompts[i] for i in which], new)
        replies |= zip(which, tokens, strict=True)
    texts = (
        session.tokenizer.decode(replies[i], skip_special_tokens=True) for i in sorted(replies)
    )
    right = iter([bool(correct(one, text)) for one, text in zip(every, texts, strict=True)])
    return [{"right": [next(right) for _ in row]} for row in rows]
