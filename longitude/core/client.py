"""The one client of OpenAI-compatible servers (vLLM, SGLang, llama.cpp, Ollama, LM Studio, …).

Requests go to the named host and nowhere else: the standard library's client follows no redirects
and uses no proxy. Transient errors (408, 425, 429, 5xx, timeouts, refused or broken connections)
are retried with exponential back-off, or after the server's Retry-After; if the first connection
fails, that is an error at once. Replies are bounded in size and time. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from longitude.core.validate import UserError, shown

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses
CONNECT_TIMEOUT = 10.0  # seconds
MAX_REPLY, MAX_SECONDS = 2**24, 3600.0  # bytes and time of one reply
MAX_KEY = 4096  # bytes of a key file
CHUNK = 2**16  # bytes read at once
SCHEMES = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
Reply = dict[str, Any]
Event = tuple[float, Reply]  # seconds since the request was sent, and the object received
Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Retry:
    """When to give up: after `tries` tries and `patience` seconds since the first failure."""

    tries: int = 3
    patience: float = 180.0
    pause: float = 0.5  # seconds before the second try; doubles after each
    longest: float = 15.0  # pause in seconds, unless the server asks for more


class RefusedError(UserError):
    """The server answered with an error that repeating the request does not change."""

    def __init__(self, sentence: str, status: int, text: str) -> None:
        super().__init__(sentence)
        self.status, self.text = status, text


class NoReplyError(UserError):
    """Every try of a request ended in a transient error; `status` is the last, 0 if none."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


class OutOfTime(Exception):
    """The caller's deadline leaves no time to continue."""


class _TransientError(Exception):
    """An error that a repeated request may not meet; `after` is the server's Retry-After."""

    def __init__(
        self, why: str, after: float | None = None, *, absent: bool = False, status: int = 0
    ) -> None:
        super().__init__(why)
        self.after, self.absent, self.status = after, absent, status


class Client:
    """A client of one server, given the URL of its API.

    Args:
        url: as in http://127.0.0.1:8000/v1; if it serves several models, with the name of one
            after a #, as in http://127.0.0.1:11434/v1#llama3.2.
        timeout: seconds to wait without receiving a byte.
        key: sent as the bearer token, for a server that wants one.
        deadline: on the clock time.monotonic(); a request that would pass it raises OutOfTime.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 600.0,
        key: str | None = None,
        retry: Retry | None = None,
        deadline: float | None = None,
    ) -> None:
        try:
            at = urlsplit(url)
            valid = at.scheme in SCHEMES and at.hostname and at.port != 0
        except ValueError:
            at, valid = urlsplit(""), False
        # credentials and queries are never passed on: a key in a URL would end up in logs
        valid = valid and not at.username and not at.query
        if not valid or not url.isascii() or not re.fullmatch(r"\S+", url):
            raise UserError(
                f"{shown(url)} is no URL of a server: write it as in http://127.0.0.1:8000/v1, "
                f"with #NAME after it if the server has several models."
            )
        self.at, self.name = at, unquote(at.fragment)
        self.path = at.path.rstrip("/") or "/v1"
        self.url = f"{at.scheme}://{at.netloc}{self.path}"
        self.timeout, self.retry, self.deadline = timeout, retry or Retry(), deadline
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self.headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self.software = ""  # what the server calls itself
        self.facts = self._find_model()

    def post(self, path: str, body: Reply) -> Reply:
        """Send a request and return the JSON object of its reply."""
        return self._retried("POST", path, {**body, "stream": False})[-1][1]

    def stream(self, path: str, body: Reply) -> list[Event]:
        """Return the events of a streamed reply; a single one if the server does not stream."""
        return self._retried("POST", path, {**body, "stream": True})

    def _find_model(self) -> Reply:
        """Return what the server lists about the named model, or about its only one."""
        try:
            listed = self._request("GET", "/models")[-1][1]
        except _TransientError as error:
            if error.absent:
                raise UserError(
                    f"no server answers at {self.url} ({error}): start it, or correct it."
                ) from error
            # the list may be refused (transformers serve without a cache): a name is enough then
            listed = {} if self.name else self._retried("GET", "/models")[-1][1]
        except UserError:
            if not self.name:
                raise
            listed = {}
        data = listed.get("data")
        rows = [row for row in (data if isinstance(data, list) else []) if isinstance(row, dict)]
        models = {row["id"]: row for row in rows if isinstance(row.get("id"), str)}
        if not self.name and len(models) != 1:
            names = ", ".join(map(shown, [*models][:8])) or "none"
            raise UserError(
                f"{self.url} has {len(models)} models ({names}): name one after a #, as in "
                f"{self.url}#NAME."
            )
        self.name = self.name or next(iter(models))
        return models.get(self.name, {})

    def _retried(self, method: str, path: str, body: Reply | None = None) -> list[Event]:
        """Send a request, repeating it while its error is transient."""
        retry, tried, started = self.retry, 0, 0.0
        while True:
            try:
                return self._request(method, path, body)
            except _TransientError as error:
                tried += 1
                started = started or time.monotonic()
                backoff = min(retry.longest, retry.pause * 2 ** min(tried - 1, 20))
                pause = backoff * random.uniform(0.5, 1) if error.after is None else error.after
                late = time.monotonic() - started + pause > retry.patience
                if (late and tried >= retry.tries) or (error.after or 0) > retry.patience:
                    raise NoReplyError(
                        f"{self.url} gave no reply ({tried}×, the last time: {error}): check the "
                        f"server's log, and try again.",
                        error.status,
                    ) from error
                if self._left() < pause:
                    raise OutOfTime from error
                time.sleep(pause)

    def _left(self) -> float:
        return math.inf if self.deadline is None else self.deadline - time.monotonic()

    def _request(self, method: str, path: str, body: Reply | None = None) -> list[Event]:
        """Send one request; return the JSON object of its reply, or those of a stream."""
        timeout = min(self.timeout, max(1.0, self._left()))  # a second even near the deadline
        connected = False
        connection: Any = SCHEMES[self.at.scheme](
            self.at.hostname or "", self.at.port, timeout=min(CONNECT_TIMEOUT, timeout)
        )
        try:
            connection.connect()
            connected = True
            connection.sock.settimeout(timeout)
            data = None if body is None else json.dumps(body).encode()
            sent = time.monotonic()
            connection.request(method, self.path + path, data, self.headers)
            with connection.getresponse() as response:
                self.software = str(response.getheader("Server") or "")
                streamed = str(response.getheader("Content-Type")).startswith("text/event-stream")
                chunks = [*self._chunks(response, sent)]
        except (OSError, http.client.HTTPException) as error:
            if not connected and isinstance(error, socket.gaierror | ssl.SSLError):
                raise UserError(
                    f"{self.url} can't be reached ({error}): correct the URL."
                ) from error
            if isinstance(error, TimeoutError) and self._left() < 0.1:
                raise OutOfTime from error
            why = str(error) or type(error).__name__
            why = "it timed out" if isinstance(error, TimeoutError) else why
            raise _TransientError(why, absent=not connected) from error
        finally:
            connection.close()
        raw = b"".join(chunk for _, chunk in chunks)
        self._check_status(response, raw)
        events = [(chunks[-1][0] if chunks else 0.0, _object(raw))]
        if streamed:  # server-sent events: the objects of lines that start with `data:`
            events, rest = [], b""
            for when, chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                data = (line.strip()[5:].strip() for line in lines if line.startswith(b"data:"))
                events += [(when, _object(text)) for text in data if text != b"[DONE]"]
        if not events or any(reply is None for _, reply in events):
            text = shown(raw[:200].decode(errors="replace"))
            raise UserError(f"{self.url} replied with {text}: give an OpenAI-compatible server.")
        return [(when, reply) for when, reply in events if reply is not None]

    def _chunks(
        self, response: http.client.HTTPResponse, sent: float
    ) -> Iterator[tuple[float, bytes]]:
        """Yield the chunks of the body as they arrive, with the seconds since the request, within
        the limits on a reply's size and time."""
        size = 0
        while size <= MAX_REPLY and (chunk := response.read1(CHUNK)):
            size += len(chunk)
            elapsed = time.monotonic() - sent
            if elapsed > MAX_SECONDS:
                raise TimeoutError
            yield elapsed, chunk

    def _check_status(self, response: http.client.HTTPResponse, raw: bytes) -> None:
        text, status = raw[:2000].decode(errors="replace"), response.status
        if status in TRANSIENT:
            after, header = None, str(response.getheader("Retry-After")).strip()
            with suppress(ValueError, TypeError, OverflowError):  # a number of seconds, or a date
                if header.isdigit():
                    after = float(header)
                else:
                    after = max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
            raise _TransientError(f"status {status}, {shown(text[:200])}", after, status=status)
        if status != 200:
            raise RefusedError(
                f"{self.url} refused a request (status {status}, {shown(text[:200])}): check that "
                f"it is the URL of an API, as http://127.0.0.1:8000/v1 is, and that the model "
                f"serves chat completions.",
                status,
                text,
            )


def gather(
    call: Callable[[Job], Result], jobs: Iterable[Job], at_once: int
) -> Iterator[tuple[int, Result]]:
    """Yield the index and result of every job as it finishes; the first error ends it."""

    def run(job: tuple[int, Job]) -> tuple[int, Result]:
        return job[0], call(job[1])

    if at_once == 1:
        yield from map(run, enumerate(jobs))
        return
    with ThreadPool(at_once) as pool:  # its threads are daemons: Ctrl-C need not wait for a reply
        yield from pool.imap_unordered(run, enumerate(jobs))


def is_url(name: object) -> bool:
    """Whether a model is named by the URL of a server."""
    return isinstance(name, str) and name.startswith(("http://", "https://"))


def read_key(path: Path) -> str:
    """Read a key from a file that holds nothing else; no error message ever shows it."""
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        key = ""
    if not re.fullmatch(r"[!-~]+", key):
        raise UserError(f"{path} holds no key: write it there alone, on one line of plain ASCII.")
    return key


def _object(raw: bytes) -> Reply | None:
    try:
        reply = json.loads(raw) if len(raw) <= MAX_REPLY else None
    except (ValueError, RecursionError):
        reply = None
    return reply if isinstance(reply, dict) else None
