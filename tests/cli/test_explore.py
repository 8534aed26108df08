"""`longitude explore`: what it says, what it writes, and that it serves until it is ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from http.client import HTTPConnection
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from longitude.explorer.data import draw
from longitude.explorer.state import Column, PageState

from .conftest import ROOT, Ran


class Loaded(HTMLParser):
    """The addresses that a page names."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if name in ("src", "href")]


def test_numbers_are_data(longitude: Callable[..., Ran]) -> None:
    code, out, err = longitude(
        "explore", "--schemes", "yarn; rope(remap=rerope(64))", "--length", "2048", "--json"
    )
    columns = (Column("yarn"), Column("written", text="rope(remap=rerope(64))"))
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(draw(PageState(length=2048, columns=columns)))


def test_it_starts_from_a_model(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    page = tmp_path / "still.html"
    code, out, err = longitude("explore", "tiny-rope", "--export", str(page))
    assert (code, out) == (0, "") and err == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "model=tiny-rope" in text and "yarn(4, original=256)" in text
    loaded = Loaded()
    loaded.feed(text)
    assert loaded.addresses == ["data:,", "#charts"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--export", "page.pdf"], "end it in .html"),
        (["--length", "1", "--json"], "length is a whole number from 2"),
        (["--schemes", "a; b; c; d", "--json"], "three"),
        (["no/such/model/anywhere", "--json"], "no file or folder"),
        (["--port", "99999", "--no-browser"], "no port"),
    ],
)
def test_mistakes_are_sentences(longitude: Callable[..., Ran], args: list[str], words: str) -> None:
    code, out, err = longitude("explore", *args)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


# what a shell starts in the background is deaf to Ctrl-C, and so would the server be
HEARING = """import signal, sys
from longitude.cli.main import run
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run(sys.argv[1:]))"""


def test_it_serves_until_it_is_ended() -> None:
    command = [sys.executable, "-c", HEARING, "explore", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            told = server.stderr.readline()
            port = int(re.findall(r"http://127\.0\.0\.1:(\d+)/", told)[0])
            assert answered(port)["columns"][0]["factor"] == 4
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=30) == 130
        finally:
            server.kill()


def answered(port: int) -> Any:
    """What the server says, once it is there."""
    for _ in range(300):
        line = HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            line.request("GET", "/api/draw?method1=yarn")
            return json.load(line.getresponse())
        except ConnectionRefusedError:
            sleep(0.1)
        finally:
            line.close()
    pytest.fail("it does not answer")
