"""The model that answers MemWalker: a checkpoint on this machine, or one behind a server.

Both are prompted in plain text at temperature 0. Requests to an OpenAI-compatible server (vLLM,
llama.cpp, Ollama, transformers serve, …) go to the host that was named and nowhere else: the
standard library's client follows no redirect and knows no proxy. Transient errors (429, 5xx,
timeouts, refused or broken connections) are retried with exponential backoff, or after the server's
Retry-After; a server that was never there is an error at once.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

import torch
from torch import nn

from longitude.core.store import address
from longitude.core.text import dump
from longitude.core.validate import UserError, shown
from longitude.eval.prefill import greedy, input_device
from longitude.hf.loading import digest
from longitude.hf.patch import scheme_of, trained_length
from longitude.reading.generate import encode
from longitude.reading.generate import prompt as prompt_layout

WINDOW = 4096  # the paper's, for a model that names none
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # statuses
CONNECT_TIMEOUT = 10.0  # seconds
MAX_REPLY = 2**24  # bytes
MODEL_FACTS = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size")  # from llama.cpp
THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


@runtime_checkable
class LLM(Protocol):
    """What MemWalker needs of a model."""

    window: int  # tokens of a prompt and its reply together, without a chat's own marks
    at_once: int  # prompts that may be sent concurrently
    fingerprint: str  # of the model: its replies are stored under it

    def size(self, text: str) -> int:
        """How many tokens a text has, or a few more."""
        ...

    def say(self, prompt: str, new: int) -> str:
        """The reply to a prompt, of at most `new` tokens."""
        ...


def replies(llm: LLM, prompts: Sequence[str], new: int) -> Iterator[tuple[int, str]]:
    """The index and reply of every prompt as they come; the first error ends it."""

    def say(job: tuple[int, str]) -> tuple[int, str]:
        return job[0], llm.say(job[1], new)

    if llm.at_once == 1:
        yield from map(say, enumerate(prompts))
        return
    with ThreadPool(llm.at_once) as pool:  # of daemon threads: Ctrl-C need not wait for a reply
        yield from pool.imap_unordered(say, enumerate(prompts))


class Local:
    """A checkpoint that `longitude.hf.load` loaded, with its tokenizer."""

    at_once = 1

    def __init__(self, model: nn.Module, tokenizer: Any, window: int | None = None) -> None:
        if tokenizer is None:
            raise UserError("the checkpoint has no tokenizer, so it can't read text: use another.")
        self.model, self.tokenizer = model, tokenizer
        try:
            scheme = dump(scheme_of(model))
        except UserError:
            scheme = ""
        self.fingerprint = f"{digest(model)} {scheme}".rstrip()
        # the tokens around a prompt are encoded apart from it: a chat's mark in a document is text
        self.layout = prompt_layout(tokenizer, None)
        self.window = (window or trained_length(model) or WINDOW) - self.layout.size

    def size(self, text: str) -> int:
        """How many tokens a text has."""
        return len(encode(self.tokenizer, text))

    def say(self, prompt: str, new: int) -> str:
        """The likeliest reply."""
        ids = encode(self.tokenizer, prompt)
        if len(ids) + new > self.window:
            raise UserError(
                f"a prompt of {len(ids)} tokens and a reply of {new} don't fit the {self.window} "
                f"that the model has for them: use one with a longer window."
            )
        row = torch.tensor(self.layout.row(ids), device=input_device(self.model))
        reply = greedy(self.model, row, new)
        return self.tokenizer.decode(reply, skip_special_tokens=True).strip()


# a server


@dataclass(frozen=True)
class Retry:
    """When to give up: after `tries` and `patience` seconds from the first failure."""

    tries: int = 3
    patience: float = 180.0
    pause: float = 0.5  # before the second try; doubles after each
    longest: float = 15.0  # pause, unless the server asks for more


class _TransientError(Exception):
    """An error that may be gone when the request is repeated, after `after` seconds if given."""

    def __init__(self, why: str, after: float | None = None, *, absent: bool = False) -> None:
        super().__init__(why)
        self.after, self.absent = after, absent


class Server:
    """A model behind a server, by the URL of its API.

    Args:
        url: as in http://127.0.0.1:8000/v1; if it serves several models, with the name of one
            after a #, as in http://127.0.0.1:11434/v1#llama3.2.
        window: tokens of a prompt and its reply; by default what the server says, or 4,096.
        at_once: concurrent requests.
        timeout: seconds without a byte from the server.
        key: sent as the bearer token, for a server that wants one.
    """

    def __init__(
        self,
        url: str,
        *,
        window: int | None = None,
        at_once: int = 8,
        timeout: float = 600.0,
        key: str | None = None,
        retry: Retry | None = None,
    ) -> None:
        if at_once < 1:
            raise UserError(f"at_once is 1 request or more, but got {at_once}: use 8.")
        try:
            at = urlsplit(url)
            valid = at.scheme in ("http", "https") and at.hostname and at.port != 0
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
        self.at_once, self.timeout, self.retry = at_once, timeout, retry or Retry()
        self.headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self.headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self.thinks = False
        facts = self._find_model()

        def positive(given: dict[str, Any], name: str) -> int | None:
            value = given.get(name)
            return value if type(value) is int and value > 0 else None

        self.window = window or positive(facts, "max_model_len") or WINDOW
        meta, known = facts.get("meta"), {"root": str(facts.get("root"))}
        if isinstance(meta, dict):
            known |= {name: positive(meta, name) for name in MODEL_FACTS}
        self.fingerprint = address({"url": self.url, "model": self.name, "meta": known})

    def size(self, text: str) -> int:
        """An upper bound on a text's tokens: one per three bytes, where most have four or five."""
        return (len(text.encode(errors="replace")) + 2) // 3

    def say(self, prompt: str, new: int) -> str:
        """The likeliest reply without the model's thinking; a model that thought until no token
        was left for its reply gets the rest of the window from then on."""
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max(new, self.window - self.size(prompt)) if self.thinks else new,
            "temperature": 0,
            "stream": False,
        }
        reply = self._retried("POST", "/chat/completions", body)
        try:
            message = reply["choices"][0]["message"]
            content = message["content"] or ""
        except (KeyError, IndexError, TypeError):
            message, content = {}, None
        if not isinstance(content, str):
            raise UserError(f"{self.url} replied with {shown(reply)}: give a server of chats.")
        said = THINKING.sub("", content).strip()
        thought = message.get("reasoning_content") or message.get("reasoning")
        if said or self.thinks or not (thought or THINKING.search(content)):
            return said
        self.thinks = True
        return self.say(prompt, new)

    def _find_model(self) -> dict[str, Any]:
        """What the server says of the model that was named, or of its only one."""
        try:
            listed = self._request("GET", "/models")
        except _TransientError as error:
            if error.absent:
                raise UserError(
                    f"no server answers at {self.url} ({error}): start it, or correct it."
                ) from error
            # the list may be refused (transformers serve without a cache): a name is enough then
            listed = {} if self.name else self._retried("GET", "/models")
        except UserError:
            if not self.name:
                raise
            listed = {}
        data = listed.get("data")
        rows = [one for one in (data if isinstance(data, list) else []) if isinstance(one, dict)]
        models = {one["id"]: one for one in rows if isinstance(one.get("id"), str)}
        if not self.name and len(models) != 1:
            names = ", ".join(map(shown, [*models][:8])) or "none"
            raise UserError(
                f"{self.url} has {len(models)} models ({names}): name one after a #, as in "
                f"{self.url}#NAME."
            )
        self.name = self.name or next(iter(models))
        return models.get(self.name, {})

    def _retried(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A request, repeated while its error is transient."""
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
                    raise UserError(
                        f"{self.url} gave no reply ({tried}×, the last time: {error}): check the "
                        f"server's log, and ask again."
                    ) from error
                time.sleep(pause)

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request: the JSON object of its reply."""
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        timeout = min(CONNECT_TIMEOUT, self.timeout)
        connection: Any = kind[self.at.scheme](
            self.at.hostname or "", self.at.port, timeout=timeout
        )
        connected = False
        try:
            connection.connect()
            connected = True
            connection.sock.settimeout(self.timeout)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self.path + path, data, self.headers)
            response = connection.getresponse()
            raw = response.read(MAX_REPLY + 1)
        except (OSError, http.client.HTTPException) as error:
            if not connected and isinstance(error, socket.gaierror | ssl.SSLError):
                raise UserError(
                    f"{self.url} can't be reached ({error}): correct the URL."
                ) from error
            why = str(error) or type(error).__name__
            why = "it timed out" if isinstance(error, TimeoutError) else why
            raise _TransientError(why, absent=not connected) from error
        finally:
            connection.close()
        text = shown(raw[:200].decode(errors="replace"))
        if response.status in TRANSIENT:
            after = _retry_after(response.getheader("Retry-After"))
            raise _TransientError(f"status {response.status}, {text}", after)
        if response.status != 200:
            raise UserError(
                f"{self.url} refused a request (status {response.status}, {text}): check that it "
                f"is the URL of an API, as http://127.0.0.1:8000/v1 is, and that its model chats."
            )
        try:
            reply = json.loads(raw) if len(raw) <= MAX_REPLY else None
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            raise UserError(f"{self.url} replied with {text}: give an OpenAI-compatible server.")
        return reply


def _retry_after(header: str | None) -> float | None:
    """What Retry-After asks for, in seconds: it is a number of them, or a date."""
    if header is None:
        return None
    try:
        if header.strip().isdigit():
            return float(header)
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
