"""A model behind an OpenAI-compatible server: vLLM, llama.cpp, Ollama, transformers serve, ….

Requests go to the host that was named and nowhere else: the standard library's client follows no
redirect and knows no proxy. What may pass (429, 5xx, a timeout, a connection refused or broken off)
is tried again after a pause that doubles, or as long as the server asks for by Retry-After; a
server that was never there is told at once.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from longitude.core.store import address
from longitude.core.validate import UserError, shown

AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses that may pass
CONNECT = 10.0  # seconds for a connection
LARGEST = 2**24  # bytes of a reply
WINDOW = 4096  # of a server that does not say
MODEL = ("n_vocab", "n_ctx_train", "n_embd", "n_params", "size")  # what llama.cpp tells of a model
THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)  # said by a model to itself


@dataclass(frozen=True)
class Retry:
    """How long to go on: `tries` at least, and for `patience` seconds from the first failure."""

    tries: int = 3
    patience: float = 180.0
    pause: float = 0.5  # before the second try; twice as long before each one after it
    longest: float = 15.0  # pause that is made unless the server asks for more

    def before(self, tried: int) -> float:
        """The pause after so many tries; not the same for all who wait."""
        most = min(self.longest, self.pause * 2 ** min(tried - 1, 20))
        return most * random.uniform(0.5, 1)


class _Trouble(Exception):
    """What may have passed when it is tried again."""

    def __init__(self, why: str, after: float | None = None, *, absent: bool = False) -> None:
        super().__init__(why)
        self.after, self.absent = after, absent


class Server:
    """A model on a server, by the address of its API.

    Args:
        url: as in http://127.0.0.1:8000/v1; where it has several models, with the name of one
            behind a #, as in http://127.0.0.1:11434/v1#llama3.2.
        window: tokens of a prompt and its reply; without it, what the server says, or 4,096.
        at_once: requests under way at the same time.
        timeout: seconds without a word from the server.
        key: sent as the bearer's key, for a server that wants one.
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
        self.at, self.name = _address(url)
        self.at_once, self.timeout, self.retry = at_once, timeout, retry or Retry()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._thinks = False
        found = self._model()
        self.window = window or _whole(found.get("max_model_len")) or WINDOW
        self.fingerprint = address({"url": self.url, "model": self.name, "meta": _meta(found)})

    @property
    def url(self) -> str:
        """The address of the API."""
        return f"{self.at.scheme}://{self.at.netloc}{self.at.path}"

    def size(self, text: str) -> int:
        """Some more tokens than a text has: one for three bytes, and most have four or five."""
        return (len(text.encode(errors="replace")) + 2) // 3

    def say(self, prompt: str, new: int) -> str:
        """The likeliest reply, without what a model said to itself before it; one that thought for
        so long that no word of its reply was left is given the rest of the window from then on."""
        said, thought = self._said(prompt, new)
        if said or not thought or self._thinks:
            return said
        self._thinks = True
        return self._said(prompt, new)[0]

    def _said(self, prompt: str, new: int) -> tuple[str, bool]:
        """A reply, and whether the model thought before it."""
        asked = {
            "model": self.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max(new, self.window - self.size(prompt)) if self._thinks else new,
            "temperature": 0,
            "stream": False,
        }
        reply = self._patiently("POST", "/chat/completions", asked)
        try:
            message = reply["choices"][0]["message"]
            content = message["content"] or ""
        except (KeyError, IndexError, TypeError):
            message, content = {}, None
        if not isinstance(content, str):
            raise UserError(f"{self.url} replied with {shown(reply)}: give a server of chats.")
        apart = any(message.get(name) for name in ("reasoning_content", "reasoning"))
        return THOUGHT.sub("", content).strip(), apart or bool(THOUGHT.search(content))

    def _model(self) -> dict[str, Any]:
        """What the server says of the model that was named, or of its only one."""
        try:
            listed = self._request("GET", "/models")
        except _Trouble as trouble:
            if trouble.absent:
                raise UserError(
                    f"no server answers at {self.url} ({trouble}): start it, or correct it."
                ) from trouble
            # a list may be refused (transformers serve without a cache): a name is enough then
            listed = {} if self.name else self._patiently("GET", "/models")
        except UserError:
            if not self.name:
                raise
            listed = {}
        data = listed.get("data")
        models = [one for one in data if _named(one)] if isinstance(data, list) else []
        if self.name:
            return next((one for one in models if one["id"] == self.name), {})
        if len(models) != 1:
            names = ", ".join(shown(one["id"]) for one in models[:8]) or "none"
            raise UserError(
                f"{self.url} has {len(models)} models ({names}): name one behind a #, as in "
                f"{self.url}#NAME."
            )
        self.name = models[0]["id"]
        return models[0]

    def _patiently(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """A request, again and again while what is in its way may pass."""
        retry, tried, begun = self.retry, 0, 0.0
        while True:
            try:
                return self._request(method, path, body)
            except _Trouble as trouble:
                tried += 1
                begun = begun or time.monotonic()
                pause = retry.before(tried) if trouble.after is None else trouble.after
                late = time.monotonic() - begun + pause > retry.patience
                if (late and tried >= retry.tries) or (trouble.after or 0) > retry.patience:
                    raise UserError(
                        f"{self.url} gave no reply ({tried}×, the last time: {trouble}): see what "
                        f"the server says, and ask again."
                    ) from trouble
                time.sleep(pause)

    def _request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One request, and what was replied."""
        data = None if body is None else json.dumps(body).encode()
        connection = self._connected()
        try:
            connection.request(method, self.at.path + path, data, self._headers)
            response = connection.getresponse()
            raw = response.read(LARGEST + 1)
        except (OSError, http.client.HTTPException) as error:
            raise _Trouble(_why(error)) from error
        finally:
            connection.close()
        return self._read(response, raw)

    def _connected(self) -> http.client.HTTPConnection:
        secure = self.at.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self.at.hostname or "", self.at.port, timeout=min(CONNECT, self.timeout))
        try:
            connection.connect()
        except (socket.gaierror, ssl.SSLError) as error:
            raise UserError(
                f"{self.url} can't be reached ({error}): correct the address."
            ) from error
        except OSError as error:
            raise _Trouble(_why(error), absent=True) from error
        connection.sock.settimeout(self.timeout)
        return connection

    def _read(self, response: http.client.HTTPResponse, raw: bytes) -> dict[str, Any]:
        """The object in a reply; else what is wrong with it."""
        told = shown(raw[:200].decode(errors="replace"))
        if response.status in AGAIN:
            after = _seconds(response.getheader("Retry-After"))
            raise _Trouble(f"status {response.status}, {told}", after)
        if response.status != 200:
            raise UserError(
                f"{self.url} refused a request (status {response.status}, {told}): see that it is "
                f"the address of an API, as http://127.0.0.1:8000/v1 is, and that its model chats."
            )
        try:
            found = json.loads(raw) if len(raw) <= LARGEST else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url} replied with {told}: give an OpenAI-compatible server.")
        return found


def _address(url: str) -> tuple[SplitResult, str]:
    """The parts of an address, and the name of a model behind it, if there is one."""
    try:
        at = urlsplit(url)
        good = at.scheme in ("http", "https") and at.hostname and at.port != 0
    except ValueError:
        at, good = urlsplit(""), False
    # what is left out is never passed on: a key in an address would end up in logs
    if not good or at.username or at.query or not (url.isascii() and re.fullmatch(r"\S+", url)):
        raise UserError(
            f"{shown(url)} is no address of a server: write it as in http://127.0.0.1:8000/v1, "
            f"with #NAME behind it where the server has several models."
        )
    return at._replace(path=at.path.rstrip("/") or "/v1", fragment=""), unquote(at.fragment)


def _named(model: Any) -> bool:
    return isinstance(model, dict) and isinstance(model.get("id"), str)


def _meta(model: dict[str, Any]) -> dict[str, Any]:
    """What a server says of a model that is no matter of when it was started."""
    meta = model.get("meta")
    numbers = {name: _whole(meta.get(name)) for name in MODEL} if isinstance(meta, dict) else {}
    return {"root": str(model.get("root")), **numbers}


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _why(error: Exception) -> str:
    return "it timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _seconds(after: str | None) -> float | None:
    """What Retry-After asks for: seconds, or a time."""
    if after is None:
        return None
    try:
        return max(0.0, float(after) if after.strip().isdigit() else _until(after))
    except (ValueError, TypeError, OverflowError):
        return None


def _until(moment: str) -> float:
    return parsedate_to_datetime(moment).timestamp() - time.time()
