"""Where input ends: which stretch of a long prompt makes no difference to the answer.

A prompt consists of filler and a question at its end. In each variant a sentence with a pass key
replaces as much filler at some depth; the last variant has another question. Text that a server has
cut makes no difference: answer and log-probabilities equal those of the plain prompt, as when that
is sent twice. So a stretch counts as unseen whether or not the model could have retrieved the key.
Its two ends are found by bisection; the server takes the prompt's length minus the stretch.
Without log-probabilities a difference shows only in the text, and a cut is claimed only if other
places of the same prompt are seen, or if the server's own count of tokens is short.

If a server refuses long prompts, its limit is found by bisecting the length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from longitude.eval.tasks.passkey import QUESTION
from longitude.probing.endpoint import (
    NEW,
    UNSTABLE,
    Endpoint,
    Request,
    difference,
    haystack,
    with_marker,
)

Kind = Literal["complete", "refused", "front", "back", "middle", "all", "unknown"]
DEPTHS = (0.0, 0.25, 0.5, 0.75)  # where markers are placed first; the question is at 1
KEY = 40_961  # of the markers
OTHER_QUESTION = "What is the colour of the sky? The sky is"  # only a few characters shorter
FLOOR = 1e-4  # nats: printed log-probabilities are rounded
NOISE = 4.0  # times the difference between two answers to one prompt
FINEST = 256  # the ends of a stretch are bisected to 1 / FINEST of a prompt
LEAST = 16  # tokens: the finest resolution
SHORT = 0.9  # of the tokens sent: a count below means that some were cut
HEAD, TAIL = 0.04, 0.96  # depths: a few kept tokens at an end do not make a middle cut


@dataclass(frozen=True)
class Look:
    """One prompt length: what was sent and counted, and which depths were seen."""

    asked: int  # tokens requested for the prompt and its answer
    length: int  # tokens sent, approximately
    counted: int | None  # by the server
    seen: Mapping[float, bool] = field(default_factory=dict)  # by depth; the question is at 1
    retrieved: Mapping[float, bool] = field(default_factory=dict)
    difference: Mapping[float, float | None] = field(default_factory=dict)  # nats
    noise: float = 0.0
    refused: str = ""
    status: int = 200

    @property
    def short(self) -> bool:
        """Whether the server counts fewer tokens than were sent."""
        return self.counted is not None and self.counted < SHORT * self.length


@dataclass(frozen=True)
class InputEnd:
    """Where input ends, how, and the evidence."""

    kind: Kind
    limit: int | None  # tokens that the server takes
    length: int  # tokens of the longest prompt
    stretch: tuple[float, float] | None = None  # depths between which nothing is seen
    looks: tuple[Look, ...] = ()
    message: str = ""  # of a server that refuses
    exact: bool = False  # the limit is the server's own count
    honest: bool = True  # the server's count agrees with what is seen

    def to_json(self) -> dict[str, Any]:
        def named(places: Mapping[float, Any]) -> dict[str, Any]:  # depths as JSON's keys
            return {"question" if d == 1 else f"{d:g}": value for d, value in places.items()}

        by_depth = ("seen", "retrieved", "difference")
        looks = [asdict(x) | {n: named(getattr(x, n)) for n in by_depth} for x in self.looks]
        return {**asdict(self), "looks": looks}


def most_requests(length: int) -> int:
    look, steps = len(DEPTHS) + 3, max(1, (FINEST - 1).bit_length())
    return 2 * look + 2 * steps + 2 * max(1, length // LEAST).bit_length()


def find_end(endpoint: Endpoint, to: int) -> InputEnd:
    """Find where the input of a server ends, up to `to` tokens."""
    first = _look(endpoint, to)
    if not first.refused:
        return _silent_end(endpoint, first, [first])
    limit = _accepted(endpoint, to, first)
    looks = [first]
    if limit:
        looks.append(_look(endpoint, limit))
        below = _silent_end(endpoint, looks[-1], looks)
        if below.kind not in ("complete", "unknown"):  # long prompts are refused, shorter ones cut
            return below
    error: Any = first.refused  # JSON with a message, or plain text
    with suppress(ValueError):
        error = json.loads(first.refused)
        for name in ("error", "message", "detail"):
            error = error.get(name, error) if isinstance(error, dict) else error
    sentence = " ".join(str(error).split())[:400]
    return InputEnd("refused", limit, to, None, tuple(looks), sentence)


def _look(endpoint: Endpoint, length: int) -> Look:
    """Test which places of a prompt the server sees."""
    hay = haystack(endpoint, length)
    plain = f"{hay}\n{QUESTION}"
    base = endpoint.ask(Request(plain, NEW))
    sent = endpoint.tokens(plain)
    if base.refused:
        return Look(length, sent, None, refused=base.refused, status=base.status)
    variants = [with_marker(hay, d, KEY) for d in DEPTHS] + [f"{hay}\n{OTHER_QUESTION}"]
    requests = [Request(plain, NEW, 1), *(Request(v, NEW) for v in variants)]
    again, *answers = endpoint.ask_all(requests, f"where input ends, {length:,} tokens", 1)
    noise = difference(base, again)
    places = dict(zip((*DEPTHS, 1.0), answers, strict=True))
    gaps = {depth: difference(base, answer) for depth, answer in places.items()}
    retrieved = {depth: str(KEY) in answer.text for depth, answer in places.items()}
    seen = {d: retrieved[d] or differs(gap, noise) for d, gap in gaps.items()}
    finite = {depth: gap if gap < 1e9 else None for depth, gap in gaps.items()}
    return Look(length, sent, base.prompt_tokens, seen, retrieved, finite, min(noise, 1e9))


def differs(gap: float, noise: float) -> bool:
    """Whether two answers are further apart than answers to one prompt that is sent twice."""
    return gap > max(FLOOR, NOISE * noise) and not noise == float("inf")


def _silent_end(endpoint: Endpoint, look: Look, looks: list[Look]) -> InputEnd:
    """Which part of a prompt a server takes if it does not refuse it."""
    unseen = [depth for depth, seen in look.seen.items() if not seen]
    end = tuple(looks)
    if not unseen:
        return InputEnd("complete", None, look.length, looks=end, honest=not look.short)
    if look.noise > UNSTABLE and not look.short:  # answers vary by themselves: no evidence
        return InputEnd("unknown", None, look.length, looks=end)
    if len(unseen) == len(look.seen) and endpoint.with_logprobs:
        return InputEnd("all", None, look.length, looks=end)
    if len(unseen) == len(look.seen):  # not even the question changes the text
        limit = look.counted if look.short else _question_end(endpoint, look.asked)
        if limit is None:
            return InputEnd("unknown", None, look.length, looks=end)
        cut = (limit / look.length, 1.0)
        honest = look.counted is None or look.short
        return InputEnd("back", limit, look.length, cut, end, exact=look.short, honest=honest)
    if not endpoint.with_logprobs and not look.short and not any(look.retrieved.values()):
        # the text did not change, but nothing shows that it would have if the server saw it all
        return InputEnd("unknown", None, look.length, looks=end)
    low, high = _stretch(endpoint, look, unseen)
    limit, counted = round(look.length * (1 - (high - low))), look.counted
    exact = counted is not None and abs(counted - limit) <= max(3 * LEAST, look.length / 50)
    kind: Kind = "front" if low <= HEAD else "back" if high >= TAIL else "middle"
    taken, honest = counted if exact else limit, counted is None or exact
    return InputEnd(kind, taken, look.length, (low, high), end, exact=exact, honest=honest)


def bisect(holds: Callable[[Any], bool], true: Any, false: Any, finest: float) -> tuple[Any, Any]:
    """Bisect to where a property ends: return neighbours where it holds and where it does not."""
    while abs(false - true) > finest:
        middle = (true + false) // 2 if isinstance(true, int) else (true + false) / 2
        true, false = (middle, false) if holds(middle) else (true, middle)
    return true, false


def _stretch(endpoint: Endpoint, look: Look, unseen: list[float]) -> tuple[float, float]:
    """The two ends of the unseen stretch, each between a seen and an unseen depth."""
    hay, seen = haystack(endpoint, look.asked), [d for d, yes in look.seen.items() if yes]
    base = endpoint.ask(Request(f"{hay}\n{QUESTION}", NEW))
    finest = max(1 / FINEST, LEAST / look.length)

    def visible(depth: float) -> bool:
        answer = endpoint.ask(Request(with_marker(hay, depth, KEY), NEW))
        return str(KEY) in answer.text or differs(difference(base, answer), look.noise)

    before = [d for d in seen if d < min(unseen)]
    after = [d for d in seen if d > max(unseen)]
    low = fmean(bisect(visible, max(before), min(unseen), finest)) if before else 0.0
    high = fmean(bisect(visible, min(after), max(unseen), finest)) if after else 1.0
    return low, high


def _question_end(endpoint: Endpoint, length: int) -> int | None:
    """The longest prompt whose answer changes with its question; None if the shortest doesn't."""

    def matters(length: int) -> bool:
        hay = haystack(endpoint, length)
        requests = [Request(f"{hay}\n{question}", NEW) for question in (QUESTION, OTHER_QUESTION)]
        answer, other = endpoint.ask_all(requests, "where the question ends", 1)
        return answer.text != other.text

    low = 2 * LEAST + NEW
    if not matters(low):
        return None
    return bisect(matters, low, length, max(LEAST, length // FINEST))[0] - NEW


def _accepted(endpoint: Endpoint, to: int, refusal: Look) -> int | None:
    """The longest prompt that is not refused, in tokens of prompt and answer: a number in the
    server's message if two requests confirm it, else by bisection."""

    def takes(length: int) -> bool:
        plain = f"{haystack(endpoint, length)}\n{QUESTION}"
        return not endpoint.ask(Request(plain, NEW)).refused

    step = max(LEAST, to // FINEST)
    for number in sorted({*map(int, re.findall(r"\d{2,9}", refusal.refused))} - {to}, reverse=True):
        if 2 * step < number < to and takes(number - step) and not takes(number + step):
            return number - step
    return bisect(takes, 0, to, step)[0] or None
