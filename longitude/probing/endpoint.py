"""A server's API as the probe uses it: prompts in, answers out, every answer recorded.

The probe prefers /completions, whose prompts are plain text, and takes /chat/completions where that
is all there is. Log-probabilities are asked for where the server gives them. An answer is recorded
under what was asked, so that a probe that was stopped goes on where it ended; keys are in no row.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from longitude.core.client import Client, NoReplyError, OutOfTime, RefusedError, Reply, gather
from longitude.core.progress import Event, Progress, silent
from longitude.core.store import Store, address
from longitude.core.validate import UserError, short
from longitude.eval.tasks import SMALL_WINDOW
from longitude.eval.tasks.passkey import KEY, QUESTION, TASK, filler

KIND = "probe"
COMPLETIONS, CHAT = "/completions", "/chat/completions"
TOP = 5  # log-probabilities of each token: what OpenAI's own API allows
CALIBRATION = (45, 90, 900)  # characters: even a window of 128 bytes takes the first two
NEW = 16  # tokens of an answer to a marker
UNSTABLE = 0.5  # nats between two answers to one prompt: kernels and batches make far less
GUESS = 0.25  # tokens per character, where the server does not count
LINEAR = 0.25  # how far a count may be from its prediction, relatively
Top = Mapping[str, float]  # tokens and their log-probabilities
WANTS_KEY = "give its key with --key-file or LONGITUDE_API_KEY."


@dataclass(frozen=True)
class Request:
    """One prompt: `repeat` tells equal ones apart, and `echo` asks for the prompt's own
    log-probabilities, `stream` for the times at which tokens come."""

    prompt: str
    new: int = 16
    repeat: int = 0
    stream: bool = False
    echo: bool = False


@dataclass(frozen=True)
class Answer:
    """What came back; `refused` is the server's sentence where it gave an error."""

    text: str = ""
    tokens: tuple[str, ...] = ()  # generated; with `echo`, those of the prompt before them
    logprobs: tuple[float | None, ...] = ()
    top: tuple[Top, ...] = ()  # the likeliest tokens in the place of each
    prompt_tokens: int | None = None  # as the server counts
    refused: str = ""
    status: int = 200
    seconds: float = 0.0
    first: float | None = None  # seconds to the first token of a stream
    chunks: int = 0  # of a stream, in which text came

    @property
    def decode(self) -> float | None:
        """Tokens per second after the first, where they came one by one."""
        spent = self.seconds - (self.first or 0.0)
        return (self.chunks - 1) / spent if self.first and self.chunks > 2 and spent > 0 else None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Answer:
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in row.items()}
        return cls(**fields)


@dataclass
class Endpoint:
    """A server, the rows of its answers, and what it can do."""

    client: Client
    store: Store
    session: str = ""  # of one probe: another one asks again
    at_once: int = 1
    progress: Progress = silent
    deadline: float | None = None  # by time.monotonic()
    planned: int = 1  # requests, at most
    text: str = ""  # of --text: what prompts are filled with, instead of generated sentences
    api: str = COMPLETIONS
    with_logprobs: bool = True
    only_streams: bool = False

    tokens_per_character: float = GUESS
    overhead: float = 0.0  # tokens that a template puts around a prompt
    counted: bool = False  # whether the server's own count gave the rate
    densities: dict[str, float] = field(default_factory=dict)  # of other text, beside the filler's
    known: set[str] = field(default_factory=set, init=False)  # addresses of what was asked
    sent_tokens: float = field(default=0.0, init=False)
    stopped: bool = field(default=False, init=False)  # by the budget

    def connect(self) -> None:
        """Find out which API there is, and how many tokens a character makes."""
        request = Request(self.fill(CALIBRATION[0]), 1)
        first = self.ask(request)
        if first.status in (404, 405, 501):
            self.api = CHAT
            first = self.ask(request)
        if first.refused:
            self.with_logprobs = False
            first = self.ask(request)
        if first.refused and first.status < 500 and first.status not in (401, 403):
            self.only_streams = True
            first = self.ask(request)
        if first.refused:
            raise UserError(
                f"{self.client.url} refuses a prompt of {CALIBRATION[0]} characters (status "
                f"{first.status}, {short(first.refused, 120)}): "
                f"{WANTS_KEY if first.status in (401, 403) else 'check its log.'}"
            )
        self.with_logprobs = bool(first.top)
        self._calibrate(first)

    def _calibrate(self, first: Answer) -> None:
        """Tokens per character of the filler, from the server's counts of two or three prompts."""
        counts = [(CALIBRATION[0], first.prompt_tokens)]
        for size in CALIBRATION[1:]:
            counts.append((size, self.ask(Request(self.fill(size), 1)).prompt_tokens))
        known = [(size, n) for size, n in counts if n]
        if len(known) < 2:
            return
        (a, m), (b, n) = known[:2]
        rate = (n - m) / (b - a)
        if not 0.02 < rate <= 4:
            return
        if len(known) > 2:  # a longer one is more exact, unless it was cut
            size, count = known[2]
            far = (count - m) / (size - a)
            rate = far if abs(far / rate - 1) < LINEAR else rate
        self.tokens_per_character, self.counted = rate, True
        self.overhead = max(0.0, m - rate * a)

    def fill(self, characters: int) -> str:
        text = self.text
        return text[:characters] if len(text) >= characters > 0 else filler(max(0, characters))

    def density(self, name: str, sample: str) -> float:
        """How many times the tokens of the filler another kind of text has, by the server's count
        of a sample; 1 where it does not count."""
        if self.counted and name not in self.densities:
            count = self.ask(Request(sample, 1)).prompt_tokens or self.tokens(sample)
            rate = (count - self.overhead) / len(sample)
            self.densities[name] = max(0.5, rate / self.tokens_per_character)
        return self.densities.get(name, 1.0)

    def characters(self, tokens: float) -> int:
        """The characters of filler that make a prompt of so many tokens."""
        return max(0, int((tokens - self.overhead) / self.tokens_per_character))

    def tokens(self, text: str) -> int:
        """About how many tokens a prompt has."""
        return round(len(text) * self.tokens_per_character + self.overhead)

    def check_time(self) -> None:
        """Raise once the budget is spent."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.stopped = True
            raise OutOfTime

    def show(self, what: str) -> None:
        """How many requests are answered, of those planned."""
        self.progress(Event(what, min(len(self.known), self.planned), self.planned, "probe"))

    def ask(self, request: Request) -> Answer:
        return self.ask_all([request])[0]

    def ask_all(
        self, requests: Sequence[Request], what: str = "", at_once: int | None = None
    ) -> list[Answer]:
        """The answers in the order of the requests; those that are recorded are not asked again."""
        keys = [self._key(request) for request in requests]
        rows = [self.store.get(key) for key in keys]
        todo = [n for n, row in enumerate(rows) if row is None]
        answers = [Answer.from_row(row) if row else Answer() for row in rows]
        if todo:
            self.check_time()
        self.known |= {address(key) for key, row in zip(keys, rows, strict=True) if row}
        jobs = [requests[n] for n in todo]
        answered = gather(self._send, jobs, self.at_once if at_once is None else at_once)
        for count, (index, answer) in enumerate(answered, 1):
            key = keys[todo[index]]
            self.store.put(key, asdict(answer))
            self.known.add(address(key))
            answers[todo[index]] = answer
            self.sent_tokens += self.tokens(jobs[index].prompt)
            self.show(what)
            if count < len(todo):
                self.check_time()
        return answers

    def _key(self, request: Request) -> dict[str, Any]:
        prompt = hashlib.sha256(request.prompt.encode()).hexdigest()
        server = {"url": self.client.url, "model": self.client.name, "session": self.session}
        how = {"api": self.api, "logprobs": self.with_logprobs}
        how |= {"streams": True} if self.only_streams else {}
        return {"kind": KIND, **server, **how, **asdict(request), "prompt": prompt}

    def body(self, request: Request) -> Reply:
        body: Reply = {"model": self.client.name, "max_tokens": request.new, "temperature": 0}
        if self.api == CHAT:
            body["messages"] = [{"role": "user", "content": request.prompt}]
            logprobs: Reply = {"logprobs": True, "top_logprobs": TOP}
        else:
            body["prompt"] = request.prompt
            logprobs = {"logprobs": TOP}
        if request.stream or self.only_streams:
            return body | {"stream_options": {"include_usage": True}}
        echo = {"echo": True} if request.echo else {}
        return body | (logprobs if self.with_logprobs else {}) | echo

    def _send(self, request: Request) -> Answer:
        started, body = time.monotonic(), self.body(request)
        try:
            if request.stream or self.only_streams:
                return _streamed(self.client.stream(self.api, body))
            answer = parse(self.client.post(self.api, body))
        except RefusedError as error:
            return Answer(refused=error.text, status=error.status)
        except OutOfTime:
            self.stopped = True
            raise
        except NoReplyError as error:
            if not error.status:
                raise
            return Answer(refused=str(error), status=error.status)
        return replace(answer, seconds=round(time.monotonic() - started, 4))


def parse(reply: Reply) -> Answer:
    """A reply of either API; what is missing or malformed stays empty."""
    choice = _first(reply.get("choices"))
    given = choice.get("logprobs")
    tokens, logprobs, top = _logprobs(given if isinstance(given, dict) else {})
    usage = reply.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    error = reply.get("error")
    return Answer(
        _said(choice),
        tokens,
        logprobs,
        top,
        count if type(count) is int and count > 0 else None,
        refused="" if choice else short(str(error or "a reply without choices"), 400),
    )


def _logprobs(
    given: Reply,
) -> tuple[tuple[str, ...], tuple[float | None, ...], tuple[Top, ...]]:
    """Tokens, log-probabilities and alternatives, of the older form and of the newer one."""
    if isinstance(given.get("content"), list):
        rows = [row for row in given["content"] if isinstance(row, dict)]
        names, values = [r.get("token") for r in rows], [r.get("logprob") for r in rows]
        maps = [
            {str(t.get("token")): t.get("logprob") for t in _list(row.get("top_logprobs"))
             if isinstance(t, dict)} for row in rows
        ]  # fmt: skip
    else:
        names, values = _list(given.get("tokens")), _list(given.get("token_logprobs"))
        maps = [x if isinstance(x, dict) else {} for x in _list(given.get("top_logprobs"))]
    top = [{str(k): n for k, v in one.items() if (n := _number(v)) is not None} for one in maps]
    return tuple(map(str, names)), tuple(map(_number, values)), tuple(top)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _streamed(events: Sequence[tuple[float, Reply]]) -> Answer:
    """The times of a stream, and its text."""
    texts, first, count, last, error = [], None, None, 0.0, "a reply without choices"
    for when, event in events:
        choice = _first(event.get("choices"))
        error = event.get("error") or ("" if choice else error)
        text, usage = _said(choice), event.get("usage")
        if text:
            first, last = when if first is None else first, when
            texts.append(text)
        if isinstance(usage, dict) and type(usage.get("prompt_tokens")) is int:
            count = usage["prompt_tokens"]
    streamed = len(events) > 1  # otherwise only the total time is known
    return Answer(
        "".join(texts),
        prompt_tokens=count,
        seconds=round(last or events[-1][0], 4),
        first=round(first, 4) if streamed and first is not None else None,
        chunks=len(texts),
        refused=short(str(error), 400) if error else "",
    )


def _said(choice: Reply) -> str:
    """The text of a choice or of a part of it; what a model thinks comes first, under a name of its
    own, and may take all the tokens that were asked for."""
    held = next((h for n in ("delta", "message") if isinstance(h := choice.get(n), dict)), {})
    texts = [choice.get("text"), *map(held.get, ("content", "reasoning_content", "reasoning"))]
    return next((text for text in texts if isinstance(text, str) and text), "")


def _first(choices: Any) -> Reply:
    one = next(iter(_list(choices)), None)
    return one if isinstance(one, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < 1e9 else None


def difference(a: Answer, b: Answer) -> float:
    """How far two answers are from each other, in nats: the largest difference of a shared token's
    log-probability, up to the first token that differs. 0 or infinity without log-probabilities."""
    if not a.top or not b.top:
        return 0.0 if a.text == b.text else float("inf")
    worst = 0.0
    for n, (ours, theirs) in enumerate(zip(a.top, b.top, strict=False)):
        shared = ours.keys() & theirs.keys()
        if not shared:
            return float("inf")
        worst = max([worst, *(abs(ours[t] - theirs[t]) for t in shared)])
        if a.tokens[n : n + 1] != b.tokens[n : n + 1]:
            break
    return worst


def haystack(endpoint: Endpoint, length: int) -> str:
    """Text that fills a prompt of `length` tokens, without its question."""
    task = f"{TASK}\n" if length >= SMALL_WINDOW else ""
    size = endpoint.characters(length - NEW) - len(task) - len(QUESTION) - 1
    return task + endpoint.fill(size)


def with_marker(hay: str, depth: float, key: int) -> str:
    """A prompt with a pass key at a depth; all else stands where it stood without the key."""
    marker = f"\n{KEY.format(key=key)}\n"
    start = hay.find("\n") + 1
    at = start + int(depth * max(0, len(hay) - start - len(marker)))
    return f"{hay[:at]}{marker}{hay[at + len(marker) :]}\n{QUESTION}"
