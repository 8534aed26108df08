"""Prompts as text, of about a given number of tokens: questions of `extend`'s families, with their
facts at chosen depths. Everything in them is generated, or from the files of --text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longitude.eval.tasks import SMALL_WINDOW, families
from longitude.eval.tasks.passkey import KEY, QUESTION, TASK
from longitude.probing.endpoint import CHAT, Endpoint

NEW = 16  # tokens of an answer to a marker
ANSWER = 24  # tokens of an answer to a question
OTHER_QUESTION = "What is the colour of the sky? The sky is"  # shorter by few characters
KEYS = range(10_000, 50_001)
SAMPLE = 64  # characters that tell how dense a family's text is


@dataclass(frozen=True)
class Question:
    """A prompt and the answer that has to follow it."""

    family: str
    length: int  # tokens of prompt and answer, about
    depth: float | None  # of the fact, where it is one
    index: int
    prompt: str
    answer: str


def haystack(endpoint: Endpoint, length: int) -> str:
    """Text that fills a prompt of `length` tokens, without its question."""
    task = f"{TASK}\n" if length >= SMALL_WINDOW else ""
    size = endpoint.characters(length - NEW) - len(task) - len(QUESTION) - 1
    return task + endpoint.fill(size)


def with_marker(hay: str, depth: float, key: int, question: str = QUESTION) -> str:
    """A prompt with a pass key at a depth; all else stands where it stood without the key."""
    marker = f"\n{KEY.format(key=key)}\n"
    start = hay.find("\n") + 1
    at = start + int(depth * max(0, len(hay) - start - len(marker)))
    return f"{hay[:at]}{marker}{hay[at + len(marker) :]}\n{question}"


def question(
    endpoint: Endpoint, family: str, length: int, index: int, *, seed: int, depth: float | None
) -> Question | None:
    """One question of a family, drawn by the seed: the same for every server. None where the length
    has no room for it."""
    rng = random.Random(f"{seed} {family} {length} {index} {depth}")
    prompt = families()[family].write(rng, length < SMALL_WINDOW)
    asked, answer = prompt.questions[0]
    facts = [f"\n{fact.strip()}\n" for fact in prompt.facts]
    task = f"{TASK}\n" if length >= SMALL_WINDOW and facts else ""
    used = sum(map(len, [*facts, asked, task])) + 1
    room = endpoint.characters(length - ANSWER) - used
    if room < 0:
        return None
    if prompt.sentences is None or facts:
        body = endpoint.fill(room)
    else:
        body = _written(prompt.sentences, SAMPLE)
        room = int(room / endpoint.density(family, body))
        body += _written(prompt.sentences, room - len(body))
    places = [depth] if depth is not None else sorted(rng.random() for _ in facts)
    text = task + _scattered(body, facts, places)
    return Question(family, length, depth, index, f"{text}\n{asked}", answer)


def _written(sentences: Iterator[str], characters: int) -> str:
    """A family's own sentences, for at least so many characters."""
    pieces, size = [], 0
    while size < characters:
        pieces.append(next(sentences))
        size += len(pieces[-1])
    return "".join(pieces)


def _scattered(body: str, facts: Sequence[str], places: Sequence[float]) -> str:
    """The facts in their order, each at the end of a word."""
    pieces, at = [], 0
    for fact, place in zip(facts, places, strict=True):
        cut = int(place * len(body))
        cut = body.find(" ", cut) + 1 or len(body) if 0 < place < 1 else cut
        pieces += [body[at : max(at, cut)], fact]
        at = max(at, cut)
    return "".join([*pieces, body[at:]])


def is_exact(endpoint: Endpoint, question: Question, text: str) -> bool:
    """Whether the answer follows at once, as greedy decoding is scored in `extend`; in a chat it
    may stand in a sentence."""
    answer = re.escape(question.answer)
    if endpoint.api == CHAT:
        return re.search(rf"(?<!\w){answer}(?!\w)", text) is not None
    return re.match(rf"\s*{answer}(?!\w)", text) is not None
