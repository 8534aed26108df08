"""A small server on loopback that can be told to misbehave, and what answers behind it: an oracle
that reads what is left of a prompt, or a real model under a scheme."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "oracle"
Token = tuple[str, dict[str, float]]  # generated, and the likeliest in its place
Brain = Callable[[str, int], list[Token]]


@dataclass(frozen=True)
class Behaviour:
    """How the server is told to behave; the default is faultless. Tokens are `size` characters."""

    limit: int | None = None  # tokens that it takes
    cut: str = "refuse"  # or front, back, middle
    names_limit: bool = True  # in the sentence of a refusal
    size: int = 4
    logprobs: bool = True
    usage: str = "true"  # or "sent" (before the cut), "none", "absurd"
    chat_only: bool = False
    streams: bool = True
    only_streams: str = ""  # "refuse" other requests, or "always" stream
    slow: float = 0.0  # seconds before each reply
    fails: tuple[int, ...] = ()  # statuses, each once, of every fifth request
    noise: float = 0.0  # nats between two answers to one prompt
    bleeds: bool = False  # answers of requests at the same time are mixed up
    redirect: str = ""
    owner: str = "vllm"
    stated: int | None = None  # max_model_len in the list of models


def oracle(seed: int = 0, *, reach: int | None = None, wrong: str = "") -> Brain:
    """Answers pass keys and named numbers from the text that it gets, or from its last `reach`
    characters; its log-probabilities depend on every character. `wrong` is a family it fails."""

    def answer(text: str, new: int) -> list[Token]:
        said = f" {_answer(text if reach is None else text[-reach:], wrong)}\n"
        tokens = re.findall(r" ?\w+|\W", said)[:new]
        digest = hashlib.sha256(f"{seed} {text}".encode()).digest()
        found = []
        for n, token in enumerate(tokens):
            shift = digest[n % 32] / 2550
            found.append((token, {token: -0.1 - shift, " the": -3 - 10 * shift, "!": -5.0}))
        return found

    return answer


def _answer(text: str, wrong: str = "") -> str:
    body, _, question = text.rpartition("\n")
    if question.endswith("The pass key is") and wrong != "passkey":
        keys = re.findall(r"The pass key is (\d+)\.", body)
        return keys[-1] if keys else "unknown"
    if (named := re.search(r"The number of the (\w+) is$", question)) and wrong != "keys":
        numbers = re.findall(rf"The number of the {named[1]} is (\d+)", body)
        return numbers[-1] if numbers else "unknown"
    if question.endswith("most often is"):
        return Counter(body.split()).most_common(1)[0][0] if body.split() else "unknown"
    return f"nothing about {question[-12:]}"


class Server:
    """The server; `requests` are the bodies that it was sent, in order."""

    def __init__(self, behaviour: Behaviour = Behaviour(), brain: Brain | None = None) -> None:  # noqa: B008
        self.behaviour, self.brain = behaviour, brain or oracle()
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.left, self.count, self.busy = [*behaviour.fails], 0, 0
        self.lock, self.last = threading.Lock(), ""
        owner = self

        class Handler(_Handler):
            server_of = owner

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def seen(self, prompt: str, room: int) -> str | None:
        """What the server's cut leaves of a prompt; None where it is refused."""
        b = self.behaviour
        if b.limit is None:
            return prompt
        most = (b.limit - room) * b.size
        if len(prompt) <= most:
            return prompt
        half = most // 2
        return {
            "refuse": None,
            "front": prompt[-most:],
            "back": prompt[:most],
            "middle": prompt[:half] + prompt[-(most - half) :],
        }[b.cut]


class _Handler(BaseHTTPRequestHandler):
    server_of: Server
    wbufsize = 2**16  # head and body in one packet: else each reply waits for 40 ms

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        b = self.server_of.behaviour
        stated = {"max_model_len": b.stated} if b.stated else {}
        self._json({"data": [{"id": MODEL, "owned_by": b.owner, **stated}]})

    def do_POST(self) -> None:
        s, b = self.server_of, self.server_of.behaviour
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with s.lock:
            s.requests.append(body)
            s.paths.append(self.path)
            s.headers.append({name.lower(): value for name, value in self.headers.items()})
            s.count += 1
            number = s.count
            status = s.left.pop(0) if s.left and number % 5 == 0 else 0
            s.busy += 1
        try:
            time.sleep(b.slow)
            if b.redirect:
                return self._json({}, 307, {"Location": b.redirect})
            if status:
                return self._json({"error": "busy"}, status, {"Retry-After": "0"})
            chat = self.path.endswith("/chat/completions")
            if b.chat_only and not chat:
                return self._json({"error": "no such route"}, 404)
            self._answer(body, chat, number)
        finally:
            with s.lock:
                s.busy -= 1

    def _answer(self, body: dict[str, Any], chat: bool, number: int) -> None:
        s, b = self.server_of, self.server_of.behaviour
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        new = body["max_tokens"]
        if b.only_streams == "refuse" and not body.get("stream"):
            return self._json({"error": {"message": "stream must be true"}}, 400)
        if not b.logprobs and body.get("logprobs"):
            return self._json({"error": {"message": "logprobs are not supported"}}, 400)
        seen = s.seen(prompt, new)
        if seen is None:
            most = f" of {b.limit} tokens" if b.names_limit else ""
            return self._json({"error": {"message": f"prompt exceeds the context{most}"}}, 400)
        tokens = s.brain(seen, new)
        if b.bleeds:
            with s.lock:
                beside, s.last = (s.last if s.busy > 1 else ""), seen
            tokens = s.brain(beside, new) if beside else tokens
        if b.noise:
            by = b.noise * (number % 3)
            tokens = [(t, {name: p - by for name, p in top.items()}) for t, top in tokens]
        counted = {
            "true": len(seen) // b.size, "sent": len(prompt) // b.size, "none": None, "absurd": 7,
        }[b.usage]  # fmt: skip
        usage = {"prompt_tokens": counted, "completion_tokens": len(tokens)}
        usage = {} if counted is None else {"usage": usage}
        if (body.get("stream") and b.streams) or b.only_streams:
            return self._stream(tokens, chat, usage)
        text = "".join(token for token, _ in tokens)
        choice: dict[str, Any] = {"message": {"content": text}} if chat else {"text": text}
        if body.get("logprobs"):
            choice["logprobs"] = _newer(tokens) if chat else _older(tokens)
        self._json({"choices": [choice], **usage})

    def _stream(self, tokens: list[Token], chat: bool, usage: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for token, _ in tokens:
                choice = {"delta": {"content": token}} if chat else {"text": token}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.001)
            last = json.dumps({"choices": [], **usage})
            self.wfile.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
            self.wfile.flush()
        except OSError:
            pass

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        try:
            self.send_response(status)
            for name, text in {**(headers or {}), "Content-Length": str(len(data))}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # nobody waits for it any more
            pass


def _older(tokens: list[Token]) -> dict[str, Any]:
    """As in the completions of vLLM."""
    return {
        "tokens": [token for token, _ in tokens],
        "token_logprobs": [top[token] for token, top in tokens],
        "top_logprobs": [top for _, top in tokens],
    }


def _newer(tokens: list[Token]) -> dict[str, Any]:
    """As in chats, and in the completions of llama.cpp."""
    return {
        "content": [
            {
                "token": token,
                "logprob": top[token],
                "top_logprobs": [{"token": name, "logprob": p} for name, p in top.items()],
            }
            for token, top in tokens
        ]
    }


def behaving(**changes: Any) -> Behaviour:
    """A behaviour by what is wrong with it."""
    return replace(Behaviour(), **changes)
