"""The server answers its own page, and everything else in a sentence."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import quote, urlencode

import pytest

from longitude.core.validate import UserError
from longitude.explorer.data import draw
from longitude.explorer.server import _run, listen
from longitude.explorer.state import Column, PageState

from .served import Asker, served

KEYS = ["model", "own", "window", "length", "dim", "heads", "column", "name", "x", ""]
KEYS += [f"{k}{n}" for k in ("method", "base", "factor", "text", "layer") for n in range(5)]
VALUES = ["", "0", "1", "-1", "2", "64", "4096", "10000000", "1e309", "nan", "inf", "٤", "'", "\0"]
VALUES += ["own", "yarn", "written", "alibi_lm", "no_such", "rope()", "rope(" * 300, "((((", "+"]
VALUES += ["layers()", "t5(buckets=10**9)", "shaw(999999999)", "rope(base=1e99)", "window(-1)"]
VALUES += [
    "learned(3) + rope()",
    "rope(fraction=0.0001)",
    "../../etc/passwd",
    "<script>",
    "x" * 9000,
]
VALUES += ["streaming(1, 1)", "rope(remap=dual_chunk(1, 1))", "xpos()", "bidirectional()", "\ud7ff"]
PATHS = ["/", "/api/draw", "/api/snippets", "/api/methods", "/api/model", "/page.js", "/page.py"]
PATHS += ["/..%2f..%2fasked.py", "/api", "/api/", "/api/draw/", "//", "/%00", "/vega.jsx", "/é"]
BODIES = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b'{"model_type": "llama"}', b"[" * 5000]
BODIES += [b'{"model_type": ["x"]}', b'{"model_type": "gpt2", "n_positions": -5}', b"1" * 4000]


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with served() as port, closing(Asker(port)) as one:
        yield one


def test_numbers_are_the_librarys(asker: Asker) -> None:
    link = "window=512&length=2048&method1=yarn&method2=leaky_rerope"
    status, told = asker.told(f"/api/draw?{link}")
    asked = PageState(window=512, length=2048, columns=(Column("yarn"), Column("leaky_rerope")))
    assert status == 200 and told == json.loads(draw(asked))


def test_the_page_loads_from_here_alone(asker: Asker) -> None:
    for path in ("/", "/page.js", "/charts.js", "/vega.js", "/page.css"):
        status, body, headers = asker.ask(path)
        assert status == 200 and body
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "'unsafe-eval'" not in policy
        assert "http" not in policy and headers["x-content-type-options"] == "nosniff"
    page = asker.ask("/")[1].decode()
    assert "//" not in page.split("</head>")[0].replace("</", "")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_other_names_of_this_machine_are_refused(asker: Asker, host: str) -> None:
    status, told = asker.told("/api/draw", Host=host)
    assert status == 403 and "127.0.0.1" in told["mistake"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:80", "LOCALHOST"])
def test_its_own_names_are_answered(asker: Asker, host: str) -> None:
    assert asker.told("/api/methods", Host=host)[0] == 200


def test_other_sites_may_not_ask(asker: Asker) -> None:
    other = {"Origin": "https://evil.example"}
    assert asker.told("/api/model?name=tiny-rope", **other)[0] == 403
    assert asker.told("/api/draw", Sec_Fetch_Site="cross-site")[0] == 403
    assert asker.told("/api/draw", Origin=f"http://127.0.0.1:{asker.port}")[0] == 200
    assert asker.told("/api/draw", Sec_Fetch_Site="same-origin")[0] == 200


def test_sizes_have_bounds(asker: Asker) -> None:
    assert asker.told("/api/draw?length=10000001")[0] == 400
    assert asker.told("/api/draw?own=" + "x" * 17000)[0] == 414
    status, told = asker.told("/api/model", method="POST", body=b" " * (2**20 + 1))
    assert status == 413 and "at most" in told["mistake"]
    asker.close()  # what was not read of the body is gone with the connection


def test_it_listens_on_the_loopback_address_alone() -> None:
    held = listen(0)
    try:
        assert held.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UserError, match="another with --port"):
            listen(held_port(held))
    finally:
        held.close()
    with pytest.raises(UserError, match="no port"):
        listen(70000)


def held_port(held: socket.socket) -> int:
    held.listen()
    return held.getsockname()[1]


def test_models_by_name_and_by_configuration(asker: Asker) -> None:
    status, told = asker.told("/api/model?name=tiny-rope")
    assert status == 200 and (told["own"], told["window"]) == ("rope()", 256)
    status, told = asker.told("/api/model?name=nowhere/at-all")
    assert status == 400 and "nowhere/at-all" in told["mistake"]
    raw = {"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2}
    status, told = asker.told("/api/model", method="POST", body=json.dumps(raw).encode())
    assert status == 200 and (told["own"], told["heads"]) == ("alibi()", 4)


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "//", ""])
def test_origins_that_are_no_address_are_refused(asker: Asker, origin: str) -> None:
    assert asker.told("/api/draw", Origin=origin)[0] == 403


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has this file")
def test_a_file_that_can_not_be_read_is_told(asker: Asker) -> None:
    status, told = asker.told("/api/model?name=/proc/self/mem")
    assert status == 400 and "can't be read" in told["mistake"]


def test_a_client_that_hangs_up_is_no_fault(asker: Asker, caplog: Any) -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    with socket.create_connection(("127.0.0.1", asker.port)) as line:
        head = f"POST /api/model HTTP/1.1\r\nHost: 127.0.0.1:{asker.port}\r\n"
        line.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        line.shutdown(socket.SHUT_WR)
        line.settimeout(10)
        line.recv(1)
    assert asker.told("/api/draw?method1=yarn")[0] == 200
    logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_random_requests(asker: Asker) -> None:
    """Every answer is a page, numbers, or one sentence; none is a fault."""
    rng, wrong = random.Random(8), 0
    for _ in range(400):
        path = rng.choice(PATHS)
        query = urlencode(
            [(rng.choice(KEYS), rng.choice(VALUES)) for _ in range(rng.randint(0, 5))]
        )
        method = rng.choice(["GET"] * 8 + ["POST", "HEAD", "PUT", "BREW"])
        body = rng.choice(BODIES) if method in ("POST", "PUT") else None
        where = f"{quote(path, safe='/%')}?{query}"
        try:
            status, said, _ = asker.ask(where, method, body)
        except ConnectionError:  # the server hung up on what is no HTTP
            asker.close()
            continue
        assert status < 500, (method, where, said[:300])
        if status >= 400 and method != "HEAD":
            sentence = json.loads(said)["mistake"]
            assert sentence.endswith(".") and "\n" not in sentence, (method, where, sentence)
            wrong += 1
    assert wrong > 120
    assert asker.told("/api/draw?method1=yarn")[0] == 200  # and it still answers


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_state_that_can_not_be_drawn_ends_no_thread() -> None:
    """What the server computes ahead of the first request fails as that request will."""
    state = PageState(columns=(Column("no_such"),))
    before = {*threading.enumerate()}
    stub: Any = SimpleNamespace(run=lambda sockets: None)
    with patch("longitude.explorer.server.server", lambda _: stub):
        _run(state, cast(Any, None))
    for thread in {*threading.enumerate()} - before:
        thread.join()
