"""A server's API as the probe uses it: prompts in, answers out, every answer recorded.

The probe prefers /completions, whose prompts are plain text, and falls back to /chat/completions.
Log-probabilities are requested if the server returns them. An answer is recorded under its request,
so that a probe that was stopped resumes where it ended; no row contains an API key.
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
TOP = 5  # log-probabilities per token: as many as OpenAI's own API allows
CALIBRATION = (45, 90, 900)  # characters: even a window of 128 bytes takes the first two
NEW = 16  # tokens of an answer to a marker
UNSTABLE = 0.5  # nats between answers to one prompt: kernels and batching cause far less
GUESS = 0.25  # tokens per character, if the server does not count
LINEAR = 0.25  # largest relative deviation of a count from its prediction
Top = Mapping[str, float]  # tokens and their log-probabilities
WANTS_KEY = "give its key with --key-file or LONGITUDE_API_KEY."


@dataclass(frozen=True)
class Request:
    """One prompt. `repeat` distinguishes equal requests, `echo` requests the log-probabilities of
    the prompt itself, and `stream` the times at which tokens arrive."""

    prompt: str
    new: int = 16
    repeat: int = 0
    stream: bool = False
    echo: bool = False


@dataclass(frozen=True)
class Answer:
    """A server's answer; `refused` is its message if it returned an error."""

    text: str = ""
    tokens: tuple[str, ...] = ()  # generated; with `echo`, those of the prompt before them
    logprobs: tuple[float | None, ...] = ()
    top: tuple[Top, ...] = ()  # the likeliest tokens at each position
    prompt_tokens: int | None = None  # as the server counts
    refused: str = ""
    status: int = 200
    seconds: float = 0.0
    first: float | None = None  # seconds to the first token of a stream
    chunks: int = 0  # of a stream, those with text

    @property
    def decode(self) -> float | None:
        """Tokens per second after the first, if they were streamed one by one."""
        spent = self.seconds - (self.first or 0.0)
        return (self.chunks - 1) / spent if self.first and self.chunks > 2 and spent > 0 else None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Answer:
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in row.items()}
        return cls(**fields)


@dataclass
class Endpoint:
    """A server, the store of its answers, and what its API supports."""

    client: Client
    store: Store
    session: str = ""  # id of one probe: another session sends everything again
    at_once: int = 1
    progress: Progress = silent
    deadline: float | None = None  # by time.monotonic()
    planned: int = 1  # requests, at most
    text: str = ""  # from --text: fills prompts in place of generated sentences
    api: str = COMPLETIONS
    with_logprobs: bool = True
    only_streams: bool = False

    tokens_per_character: float = GUESS
    overhead: float = 0.0  # tokens that a template puts around a prompt
    counted: bool = False  # whether the server's own count gave the rate
    densities: dict[str, float] = field(default_factory=dict)  # of other text, over the filler's
    known: set[str] = field(default_factory=set, init=False)  # addresses of recorded answers
    sent_tokens: float = field(default=0.0, init=False)
    stopped: bool = field(default=False, init=False)  # by the budget

    def connect(self) -> None:
        """Detect which API the server supports, and measure its tokens per character."""
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
        if len(known) > 2:  # a longer prompt is more exact, unless it was cut
            size, count = known[2]
            long_rate = (count - m) / (size - a)
            rate = long_rate if abs(long_rate / rate - 1) < LINEAR else rate
        self.tokens_per_character, self.counted = rate, True
        self.overhead = max(0.0, m - rate * a)

    def fill(self, characters: int) -> str:
        text = self.text
        return text[:characters] if len(text) >= characters > 0 else filler(max(0, characters))

    def density(self, name: str, sample: str) -> float:
        """Tokens per character of another kind of text, relative to the filler's, by the server's
        count of a sample; 1 if it does not count."""
        if self.counted and name not in self.densities:
            count = self.ask(Request(sample, 1)).prompt_tokens or self.tokens(sample)
            rate = (count - self.overhead) / len(sample)
            self.densities[name] = max(0.5, rate / self.tokens_per_character)
        return self.densities.get(name, 1.0)

    def characters(self, tokens: float) -> int:
        """The number of characters of filler in a prompt of this many tokens."""
        return max(0, int((tokens - self.overhead) / self.tokens_per_character))

    def tokens(self, text: str) -> int:
        """The approximate number of tokens in a prompt."""
        return round(len(text) * self.tokens_per_character + self.overhead)

    def check_time(self) -> None:
        """Raise once the budget is spent."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.stopped = True
            raise OutOfTime

    def show(self, what: str) -> None:
        """Report how many of the planned requests are answered."""
        self.progress(Event(what, min(len(self.known), self.planned), self.planned, "probe"))

    def ask(self, request: Request) -> Answer:
        return self.ask_all([request])[0]

    def ask_all(
        self, requests: Sequence[Request], what: str = "", at_once: int | None = None
    ) -> list[Answer]:
        """Return the answers in the order of the requests; recorded ones are not sent again."""
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
        mode = {"api": self.api, "logprobs": self.with_logprobs}
        mode |= {"streams": True} if self.only_streams else {}
        return {"kind": KIND, **server, **mode, **asdict(request), "prompt": prompt}

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
    """Parse a reply of either API; missing or malformed fields stay empty."""
    choice = _first(reply.get("choices"))
    raw = choice.get("logprobs")
    tokens, logprobs, top = _logprobs(raw if isinstance(raw, dict) else {})
    usage = reply.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    error = reply.get("error")
    return Answer(
        _choice_text(choice),
        tokens,
        logprobs,
        top,
        count if type(count) is int and count > 0 else None,
        refused="" if choice else short(str(error or "a reply without choices"), 400),
    )


def _logprobs(
    given: Reply,
) -> tuple[tuple[str, ...], tuple[float | None, ...], tuple[Top, ...]]:
    """Tokens, log-probabilities and alternatives, from the older format or the newer (chat) one."""
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
    top = [{str(k): n for k, v in entry.items() if (n := _number(v)) is not None} for entry in maps]
    return tuple(map(str, names)), tuple(map(_number, values)), tuple(top)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _streamed(events: Sequence[tuple[float, Reply]]) -> Answer:
    """The text of a stream, and its times."""
    texts, first, count, last, error = [], None, None, 0.0, "a reply without choices"
    for when, event in events:
        choice = _first(event.get("choices"))
        error = event.get("error") or ("" if choice else error)
        text, usage = _choice_text(choice), event.get("usage")
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


def _choice_text(choice: Reply) -> str:
    """The text of a choice or of a streamed part of one. A model's reasoning comes first, in a
    separate field, and may take all the tokens that were requested."""
    message = next((h for n in ("delta", "message") if isinstance(h := choice.get(n), dict)), {})
    texts = [choice.get("text"), *map(message.get, ("content", "reasoning_content", "reasoning"))]
    return next((text for text in texts if isinstance(text, str) and text), "")


def _first(choices: Any) -> Reply:
    choice = next(iter(_list(choices)), None)
    return choice if isinstance(choice, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < 1e9 else None


def difference(a: Answer, b: Answer) -> float:
    """The largest difference of a shared token's log-probability in nats, up to the first differing
    token; infinity if none is shared. Without log-probabilities 0 (equal texts) or infinity."""
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
    """The text of a prompt of `length` tokens, without its question."""
    task = f"{TASK}\n" if length >= SMALL_WINDOW else ""
    size = endpoint.characters(length - NEW) - len(task) - len(QUESTION) - 1
    return task + endpoint.fill(size)


def with_marker(hay: str, depth: float, key: int) -> str:
    """A prompt with a pass key in place of filler at a depth: all other text keeps its position."""
    marker = f"\n{KEY.format(key=key)}\n"
    start = hay.find("\n") + 1
    at = start + int(depth * max(0, len(hay) - start - len(marker)))
    return f"{hay[:at]}{marker}{hay[at + len(marker) :]}\n{QUESTION}"
