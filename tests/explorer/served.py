"""A server of the page for tests: on a port of its own, until the end of a block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread
from time import sleep
from typing import Any

from longitude.explorer.server import listen, server
from longitude.explorer.state import PageState


@contextmanager
def served(asked: PageState | None = None) -> Iterator[int]:
    """The port of a page that is being served."""
    held = listen(0)
    one = server(asked or PageState())
    thread = Thread(target=one.run, kwargs={"sockets": [held]}, daemon=True)
    thread.start()
    while not one.started:
        sleep(0.01)
    try:
        yield held.getsockname()[1]
    finally:
        one.should_exit = True
        thread.join()


class Asker:
    """One connection, on which questions are asked one after the other."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.line = HTTPConnection("127.0.0.1", port, timeout=60)

    def close(self) -> None:
        """Hang up."""
        self.line.close()

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        """The status, the body and the headers (in small letters) of an answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.line.request(method, path, body, named)
        answer = self.line.getresponse()
        return answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()}

    def told(self, path: str, **more: Any) -> tuple[int, Any]:
        """The status, and what an answer in JSON says."""
        status, body, headers = self.ask(path, **more)
        assert headers["content-type"] == "application/json", (path, status, body[:200])
        return status, json.loads(body)
