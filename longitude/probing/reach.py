"""Reach: which questions are answered, by length and depth, and how fast.

The questions come from the generators of `extend`'s families, one question per prompt; greedy text
has to begin with the exact answer. Pass keys are placed at five depths. If a server returns the
log-probabilities of a prompt (`echo`), the loss of the answer is measured as well. Times are those
of one streamed request at each length, with no others beside it.

The effective length is the longest one up to which every length has at least 85.6 % of the share of
correct answers at the shortest. RULER uses 85.6 % as an absolute bound (Hsieh et al. 2024,
arXiv:2404.06654).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from longitude.core.client import OutOfTime
from longitude.eval.records import PASSKEY
from longitude.eval.stats import Interval, share
from longitude.eval.tasks import SMALL_WINDOW, families
from longitude.eval.tasks.passkey import TASK
from longitude.probing.endpoint import CHAT, Answer, Endpoint, Request, haystack

BOUND = 0.856
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = 4  # each twice the one before
ANSWER = 24  # tokens of an answer
SAMPLE = 64  # characters of a text from which its tokens per character are measured
LONGEST_ECHO = 8192  # tokens: log-probabilities of a longer prompt make too large a reply


@dataclass(frozen=True)
class Question:
    """A prompt of about `length` tokens, answer included, and the answer that has to follow."""

    family: str
    length: int
    depth: float | None  # of the fact, if it is fixed
    index: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class Answered:
    """A question with its answer; `top` holds the likeliest first tokens."""

    family: str
    length: int
    depth: float | None
    index: int
    exact: bool
    text: str
    top: dict[str, float]
    loss: float | None = None  # nats per token of the expected answer


@dataclass(frozen=True)
class Speed:
    length: int
    first: float | None  # seconds to the first token
    decode: float | None  # tokens per second after it
    seconds: float


@dataclass(frozen=True)
class Reach:
    answers: tuple[Answered, ...] = ()
    speeds: tuple[Speed, ...] = ()

    @property
    def lengths(self) -> list[int]:
        return sorted({a.length for a in self.answers})

    @property
    def families(self) -> list[str]:
        return [*dict.fromkeys(a.family for a in self.answers)]

    def at(
        self, length: int, family: str | None = None, depth: float | None = None
    ) -> list[Answered]:
        """The answered questions of a length, optionally of one family or depth."""
        return [
            a
            for a in self.answers
            if a.length == length and family in (None, a.family) and depth in (None, a.depth)
        ]

    def share(self, length: int, family: str | None = None, depth: float | None = None) -> Interval:
        """The share of correct answers, with Wilson's interval; n is 0 if nothing was asked."""
        correct = [a.exact for a in self.at(length, family, depth)]
        return share(correct) if correct else Interval(0.0, 0.0, 1.0, 0)

    def loss(self, length: int) -> float | None:
        """The mean loss of the expected answers, if the server returns log-probabilities."""
        losses = [a.loss for a in self.at(length) if a.loss is not None]
        return fmean(losses) if losses else None

    @property
    def effective_length(self) -> int | None:
        """In tokens; None if nothing is answered even at the shortest length."""
        lengths = self.lengths
        if not lengths or not self.share(lengths[0]).mean:
            return None
        bound, reached = BOUND * self.share(lengths[0]).mean, lengths[0]
        for length in lengths:
            if self.share(length).mean < bound:
                break
            reached = length
        return reached

    def to_json(self) -> dict[str, Any]:
        return {
            "effective_length": self.effective_length,
            "lengths": [
                {"length": n, "retrieval": asdict(self.share(n)), "answer_loss": self.loss(n)}
                | {"families": {f: self.share(n, f).mean for f in self.families if self.at(n, f)}}
                for n in self.lengths
            ],
            "speeds": [asdict(one) for one in self.speeds],
            "questions": [asdict(one) for one in self.answers],
        }


def ladder(to: int) -> list[int]:
    return [n for k in range(LENGTHS - 1, -1, -1) if (n := to >> k) >= 32]


def question(
    endpoint: Endpoint, family: str, length: int, index: int, *, seed: int, depth: float | None
) -> Question | None:
    """One question of a family, drawn by the seed: the same for every server. None if it does not
    fit into the length."""
    rng = random.Random(f"{seed} {family} {length} {index} {depth}")
    prompt = families()[family].write(rng, length < SMALL_WINDOW)
    ending, answer = prompt.questions[0]
    facts = [f"\n{fact.strip()}\n" for fact in prompt.facts]
    task = f"{TASK}\n" if length >= SMALL_WINDOW and facts else ""
    used = sum(map(len, [*facts, ending, task])) + 1
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
    pieces, at = [task], 0
    for fact, place in zip(facts, places, strict=True):  # in order, each at the end of a word
        cut = int(place * len(body))
        cut = body.find(" ", cut) + 1 or len(body) if 0 < place < 1 else cut
        pieces += [body[at : max(at, cut)], fact]
        at = max(at, cut)
    text = "".join([*pieces, body[at:]])
    return Question(family, length, depth, index, f"{text}\n{ending}", answer)


def _written(sentences: Iterator[str], characters: int) -> str:
    """A family's own sentences, at least this many characters in all."""
    pieces, size = [], 0
    while size < characters:
        pieces.append(next(sentences))
        size += len(pieces[-1])
    return "".join(pieces)


def measure(
    endpoint: Endpoint, lengths: Sequence[int], tasks: Sequence[str], count: int, seed: int
) -> Reach:
    """Ask every question and time one request at each length, until the budget ends."""
    echoes, answered, speeds = False, [], []
    if endpoint.with_logprobs:  # whether `echo` returns the prompt's log-probabilities
        text = "The sky is blue. The sky is"
        echo = endpoint.ask(Request(text, 1, echo=True))
        echoes = not echo.refused and "".join(echo.tokens).startswith(text)
    for length in lengths:
        try:
            questions = (
                question(endpoint, name, length, index, seed=seed, depth=depth)
                for name in tasks
                for index in range(count)
                for depth in (DEPTHS if name == PASSKEY else (None,))
            )
            at_length = [q for q in questions if q is not None]
            answered += _answered(endpoint, at_length, echoes and length <= LONGEST_ECHO)
            timed = question(endpoint, PASSKEY, length, -1, seed=seed, depth=0.5)
            prompt = timed.prompt if timed else haystack(endpoint, length)
            stream = endpoint.ask(Request(prompt, ANSWER, stream=True))
        except OutOfTime:
            break
        if not stream.refused:
            speeds.append(Speed(length, stream.first, stream.decode, stream.seconds))
    return Reach(tuple(answered), tuple(speeds))


def _answered(endpoint: Endpoint, here: Sequence[Question], echoes: bool) -> list[Answered]:
    """The questions of one length with the server's answers and, if it echoes, their losses."""
    what = f"retrieval, {here[0].length:,} tokens" if here else ""
    answers = endpoint.ask_all([Request(q.prompt, ANSWER) for q in here], what)
    losses: list[float | None] = [None] * len(here)
    if echoes:
        completed = [Request(f"{q.prompt} {q.answer}", 1, echo=True) for q in here]
        echoed = zip(endpoint.ask_all(completed, what), here, strict=True)
        losses = [answer_loss(echo, q.prompt, q.answer) for echo, q in echoed]
    results, start = [], r"(?<!\w)" if endpoint.api == CHAT else r"\A\s*"
    for q, answer, loss in zip(here, answers, losses, strict=True):
        if answer.refused:  # longer than estimated
            continue
        first = dict(answer.top[0]) if answer.top else {}
        # answers must come at once, as `extend` scores greedy decoding; a chat may put text before
        pattern = rf"{start}{re.escape(q.answer)}(?!\w)"
        exact, place = re.search(pattern, answer.text) is not None, (q.depth, q.index)
        results.append(Answered(q.family, q.length, *place, exact, answer.text, first, loss))
    return results


def answer_loss(echoed: Answer, prompt: str, answer: str) -> float | None:
    """The mean loss of the answer's tokens, which follow the prompt."""
    at, losses = 0, []
    for token, logprob in zip(echoed.tokens, echoed.logprobs, strict=False):
        if len(prompt) <= at < len(prompt) + len(answer) + 1 and logprob is not None:
            losses.append(-logprob)
        at += len(token)
    return fmean(losses) if losses else None
