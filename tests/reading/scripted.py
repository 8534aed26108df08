"""A server on loopback that says what a script tells it to, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

MODEL = "scripted"


@dataclass(frozen=True)
class Bad:
    """A reply that is none."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b"{}"
    wait: float = 0.0  # seconds before it comes
    drop: bool = False  # break the connection off instead


Script = Callable[[str], str | Bad]


class Scripted:
    """The server; `prompts` are the chats it was asked, in order, and `most` how many at once."""

    def __init__(self, script: Script, models: Any = None, port: int = 0) -> None:
        self.script, self.models = script, models
        self.prompts: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.busy = self.most = 0
        self.lock = threading.Lock()
        self._start(port)

    def _start(self, port: int) -> None:
        owner = self

        class Handler(_Handler):
            scripted = owner

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def back(self) -> None:
        """Up again where it was."""
        self._start(self.port)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    scripted: Scripted

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.scripted.paths.append(self.path)
        models = self.scripted.models
        listed = {"data": [{"id": MODEL}]} if models is None else models
        self._send(listed if isinstance(listed, Bad) else Bad(body=json.dumps(listed).encode()))

    def do_POST(self) -> None:
        s = self.scripted
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = asked["messages"][-1]["content"]
        with s.lock:
            s.busy += 1
            s.most = max(s.most, s.busy)
            s.prompts.append(prompt)
            s.asked.append(asked)
            s.paths.append(self.path)
            s.headers.append({name.lower(): value for name, value in self.headers.items()})
        try:
            reply = _wrapped(s.script(prompt))
        finally:  # before it is sent: whoever has the reply may ask again at once
            with s.lock:
                s.busy -= 1
        self._send(reply)

    def _send(self, reply: Bad) -> None:
        time.sleep(reply.wait)
        if reply.drop:
            self.close_connection = True
            return
        try:
            self.send_response(reply.status)
            for name, value in (*reply.headers, ("Content-Length", str(len(reply.body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)
        except OSError:  # nobody waits for it any more
            pass


def _wrapped(reply: str | Bad) -> Bad:
    if isinstance(reply, Bad):
        return reply
    message = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
    return Bad(body=json.dumps(message).encode())
