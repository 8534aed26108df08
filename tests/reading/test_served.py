"""MemWalker from end to end: a real model, served by transformers' own server on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import longitude.hf as lh
from longitude.core.progress import Event
from longitude.reading.llm import Local, Server
from longitude.reading.memwalker import NO_ANSWER, Walk, prompt, read

SERVING = ("fastapi", "openai", "uvicorn")  # what `transformers serve` needs: transformers[serving]
QUESTION = "What is the code of the chest?"
TEXT = (
    "The market in the old town opens at six. Farmers sell apples, bread and honey. " * 16
    + "The captain wrote in his diary that the code of the chest is 7351. "
    + "The museum keeps four hundred clocks. A man winds each of them on Fridays. " * 16
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smol(smollm2_file: Path) -> Any:
    return lh.load(smollm2_file, device="cpu", dtype="float32", quiet=True)


@pytest.fixture(scope="module")
def server(smol: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if missing := [name for name in SERVING if find_spec(name) is None]:
        pytest.skip(f"transformers serve needs {', '.join(missing)}: transformers[serving]")
    folder, (model, tokenizer) = tmp_path_factory.mktemp("smol"), smol
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with subprocess.Popen([*command, *where], env={**os.environ, "HF_HUB_OFFLINE": "1"}) as serving:
        try:
            _wait(port, serving)
            yield Server(f"http://127.0.0.1:{port}/v1#{folder}", window=1400, at_once=2)
        finally:
            serving.terminate()


def _wait(port: int, serving: subprocess.Popen[bytes], seconds: float = 240.0) -> None:
    """Until it answers that it is well."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert serving.poll() is None, "the server ended"
        try:
            with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not start")


def test_a_served_model_says_what_it_says_here(smol: Any, server: Server) -> None:
    asked = prompt("summarize", text=TEXT[:400])
    assert server.say(asked, 24) == Local(*smol).say(asked, 24) != ""


def test_it_reads_a_text_from_end_to_end(server: Server, tmp_path: Path) -> None:
    """135 million parameters follow no format for long, so that the answer is not what is tested:
    that every part was read, the walk ended, and the next question needs no summary."""
    built: list[Event] = []
    walk = read(TEXT, QUESTION, server, folder=tmp_path, progress=built.append)
    _check(walk)
    assert built[-1].done == built[-1].total == len(walk.tree.children) + 1
    assert not built[-1].figures
    again = read(TEXT, "Who winds the clocks?", server, folder=tmp_path, progress=built.append)
    _check(again)
    assert again.tree == walk.tree
    assert built[-1].done == built[-1].total and built[-1].figures["cached"] == str(built[-1].total)


def _check(walk: Walk) -> None:
    leaves = walk.tree.children
    assert len(leaves) > 1 and "".join(TEXT[leaf.start : leaf.stop] for leaf in leaves) == TEXT
    assert all(node.summary for node in (walk.tree, *leaves))
    last = walk.path[-1]
    assert (walk.text == last.answer) if walk.found else (walk.text == NO_ANSWER)
    if last.action == "invalid":
        assert len(last.invalid) == 3
