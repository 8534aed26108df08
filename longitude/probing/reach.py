"""Reach: which questions are answered, by length and depth, and how fast.

The families of `extend`, by their generators, each question in a prompt of its own; greedy text has
to begin with the exact answer. The pass key is asked for at five depths. Where a server gives the
log-probabilities of a prompt (`echo`), the answer's loss is taken as well. Times are those of one
streamed request at each length, with nothing beside it.

The effective length is the longest one up to which every length has at least 85.6 % of the share of
right answers at the shortest; 85.6 % is the bound of RULER (Hsieh et al. 2024, arXiv:2404.06654),
there an absolute one.
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
SAMPLE = 64  # characters that tell how dense a family's text is
LONGEST_ECHO = 8192  # tokens: log-probabilities of a longer prompt make too large a reply


@dataclass(frozen=True)
class Question:
    """A prompt of about `length` tokens, answer included, and the answer that has to follow."""

    family: str
    length: int
    depth: float | None  # of the fact, where it is one
    index: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class Answered:
    """A question and what became of it; `top` are the likeliest first tokens."""

    family: str
    length: int
    depth: float | None
    index: int
    exact: bool
    text: str
    top: dict[str, float]
    loss: float | None = None  # nats per token of the right answer


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
        return sorted({one.length for one in self.answers})

    @property
    def families(self) -> list[str]:
        return [*dict.fromkeys(one.family for one in self.answers)]

    def at(
        self, length: int, family: str | None = None, depth: float | None = None
    ) -> list[Answered]:
        """The questions of a length, of one family or depth where that is given."""
        return [
            one
            for one in self.answers
            if one.length == length and family in (None, one.family) and depth in (None, one.depth)
        ]

    def share(self, length: int, family: str | None = None, depth: float | None = None) -> Interval:
        """The share of right answers, with Wilson's interval; n is 0 where nothing was asked."""
        right = [one.exact for one in self.at(length, family, depth)]
        return share(right) if right else Interval(0.0, 0.0, 1.0, 0)

    def loss(self, length: int) -> float | None:
        """The mean loss of the right answers, where the server tells."""
        known = [one.loss for one in self.at(length) if one.loss is not None]
        return fmean(known) if known else None

    @property
    def effective_length(self) -> int | None:
        """Tokens; None where nothing is answered at the shortest length either."""
        lengths = self.lengths
        if not lengths or not self.share(lengths[0]).mean:
            return None
        least, reached = BOUND * self.share(lengths[0]).mean, lengths[0]
        for length in lengths:
            if self.share(length).mean < least:
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
    """One question of a family, drawn by the seed: the same for every server. None where the length
    has no room for it."""
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
    for fact, place in zip(facts, places, strict=True):  # in their order, each at a word's end
        cut = int(place * len(body))
        cut = body.find(" ", cut) + 1 or len(body) if 0 < place < 1 else cut
        pieces += [body[at : max(at, cut)], fact]
        at = max(at, cut)
    text = "".join([*pieces, body[at:]])
    return Question(family, length, depth, index, f"{text}\n{ending}", answer)


def _written(sentences: Iterator[str], characters: int) -> str:
    """A family's own sentences, for at least so many characters."""
    pieces, size = [], 0
    while size < characters:
        pieces.append(next(sentences))
        size += len(pieces[-1])
    return "".join(pieces)


def measure(
    endpoint: Endpoint, lengths: Sequence[int], tasks: Sequence[str], count: int, seed: int
) -> Reach:
    """Ask every question, and time a request at each length, as far as the budget goes."""
    echoes, answered, speeds = False, [], []
    if endpoint.with_logprobs:  # whether `echo` returns the prompt with its own
        text = "The sky is blue. The sky is"
        echo = endpoint.ask(Request(text, 1, echo=True))
        echoes = not echo.refused and "".join(echo.tokens).startswith(text)
    for length in lengths:
        try:
            asked = (
                question(endpoint, name, length, index, seed=seed, depth=depth)
                for name in tasks
                for index in range(count)
                for depth in (DEPTHS if name == PASSKEY else (None,))
            )
            here = [one for one in asked if one is not None]
            answered += _answered(endpoint, here, echoes and length <= LONGEST_ECHO)
            timed = question(endpoint, PASSKEY, length, -1, seed=seed, depth=0.5)
            prompt = timed.prompt if timed else haystack(endpoint, length)
            stream = endpoint.ask(Request(prompt, ANSWER, stream=True))
        except OutOfTime:
            break
        if not stream.refused:
            speeds.append(Speed(length, stream.first, stream.decode, stream.seconds))
    return Reach(tuple(answered), tuple(speeds))


def _answered(endpoint: Endpoint, here: Sequence[Question], echoes: bool) -> list[Answered]:
    """The questions of one length with the server's answers, and their losses where it tells."""
    what = f"retrieval, {here[0].length:,} tokens" if here else ""
    answers = endpoint.ask_all([Request(one.prompt, ANSWER) for one in here], what)
    losses: list[float | None] = [None] * len(here)
    if echoes:
        right = [Request(f"{one.prompt} {one.answer}", 1, echo=True) for one in here]
        echoed = zip(endpoint.ask_all(right, what), here, strict=True)
        losses = [answer_loss(echo, one.prompt, one.answer) for echo, one in echoed]
    found, before = [], r"(?<!\w)" if endpoint.api == CHAT else r"\A\s*"
    for one, answer, loss in zip(here, answers, losses, strict=True):
        if answer.refused:  # longer than thought
            continue
        first = dict(answer.top[0]) if answer.top else {}
        # it follows at once, as greedy decoding is scored in `extend`; a chat may have sentences
        pattern = rf"{before}{re.escape(one.answer)}(?!\w)"
        exact, place = re.search(pattern, answer.text) is not None, (one.depth, one.index)
        found.append(Answered(one.family, one.length, *place, exact, answer.text, first, loss))
    return found


def answer_loss(echoed: Answer, prompt: str, answer: str) -> float | None:
    """The loss of the tokens between the prompt's end and the answer's."""
    at, losses = 0, []
    for token, logprob in zip(echoed.tokens, echoed.logprobs, strict=False):
        if len(prompt) <= at < len(prompt) + len(answer) + 1 and logprob is not None:
            losses.append(-logprob)
        at += len(token)
    return fmean(losses) if losses else None
