"""A server: what is sent, what is tried again, and the sentence for everything that is no reply."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from longitude.core.client import MAX_REPLY, Retry, gather
from longitude.core.validate import UserError
from longitude.reading.llm import Server
from longitude.reading.memwalker import read

from .scripted import MODEL, Bad, Script, Scripted

QUICK = Retry(tries=3, patience=5.0, pause=0.01, longest=0.05)
HASTY = Retry(tries=3, patience=0.0, pause=0.001)


def after(failures: int, bad: Bad, good: str = "fine") -> Script:
    """Fails so many times first."""
    left = [bad] * failures

    def script(prompt: str) -> str | Bad:
        return left.pop() if left else good

    return script


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_a_prompt_is_a_chat_at_temperature_0() -> None:
    with Scripted(lambda prompt: " fine\n") as server:
        speaker = Server(server.url + "/", key="s3cret")
        assert speaker.say("Hello?", 7) == "fine"
        assert server.asked == [
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Hello?"}],
                "max_tokens": 7,
                "temperature": 0,
                "stream": False,
            }
        ]
        assert server.paths == ["/v1/models", "/v1/chat/completions"]
        assert server.headers[0]["authorization"] == "Bearer s3cret"
        Server(server.url.removesuffix("/v1")).say("Hello?", 7)
        assert server.paths[-1] == "/v1/chat/completions"
        assert "authorization" not in server.headers[-1]


def test_thoughts_are_no_reply() -> None:
    for said, heard in (
        ("<think>Action: 1\n</think>\n\nAction: 0", "Action: 0"),
        ("<think>it never ended", ""),
        ("a < b", "a < b"),
    ):
        with Scripted(lambda prompt, said=said: said) as server:
            assert Server(server.url).say("?", 7) == heard


def test_one_who_thinks_for_long_is_given_the_room_for_it() -> None:
    def script(prompt: str) -> str | Bad:
        enough = server.asked[-1]["max_tokens"] > 1000
        return "<think>so</think>fine" if enough else "<think>so, or else"

    def apart(prompt: str) -> str | Bad:
        enough = server.asked[-1]["max_tokens"] > 1000
        message = {"content": "fine" if enough else None, "reasoning_content": "so, or else"}
        return Bad(body=json.dumps({"choices": [{"message": message}]}).encode())

    for thinker in (script, apart):
        with Scripted(thinker) as server:
            speaker = Server(server.url, window=2048)
            assert [speaker.say("a" * 30, 7) for _ in range(3)] == ["fine"] * 3
            assert [asked["max_tokens"] for asked in server.asked] == [7, *[2048 - 10] * 3]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with Scripted(after(2, Bad(status))) as server:
        assert Server(server.url, retry=QUICK).say("?", 7) == "fine"
        assert server.prompts == ["?"] * 3


@pytest.mark.parametrize("bad", [Bad(wait=0.6), Bad(drop=True)])
def test_timeouts_and_broken_connections_are_tried_again(bad: Bad) -> None:
    with Scripted(after(2, bad)) as server:
        assert Server(server.url, timeout=0.25, retry=QUICK).say("?", 7) == "fine"
        assert len(server.prompts) == 3


def test_it_waits_as_long_as_the_server_asks_for() -> None:
    asked = Bad(429, (("Retry-After", "1"),))
    with Scripted(after(1, asked)) as server:
        begun = time.monotonic()
        assert Server(server.url, retry=QUICK).say("?", 7) == "fine"
        assert time.monotonic() - begun >= 1
    moment = formatdate(time.time() + 2, usegmt=True)  # whole seconds: 1 to 2 from now
    with Scripted(after(1, Bad(503, (("Retry-After", moment),)))) as server:
        begun = time.time()
        assert Server(server.url, retry=QUICK).say("?", 7) == "fine"
        assert time.time() - begun >= 0.9
    for odd in ("soon", "-1", "", "9" * 400, formatdate(0, usegmt=True)):
        with Scripted(after(1, Bad(429, (("Retry-After", odd),)))) as server:
            speaker = Server(server.url, retry=QUICK)
            if odd.isdigit():
                with pytest.raises(UserError, match=r"gave no reply \(1×"):
                    speaker.say("?", 7)
            else:
                assert speaker.say("?", 7) == "fine"


def test_it_gives_up_with_a_sentence() -> None:
    with Scripted(after(99, Bad(503, body=b"overloaded \x1b[31m"))) as server:
        with pytest.raises(UserError) as told:
            Server(server.url, retry=HASTY).say("?", 7)
        assert len(server.prompts) == 3
        assert "(3×, the last time: status 503" in str(told.value)
        assert "\x1b" not in str(told.value) and "\n" not in str(told.value)


def test_a_server_that_dies_and_comes_back() -> None:
    """Five prompts; it dies at the third, which is lost, and is back a little later."""

    def script(prompt: str) -> str | Bad:
        if len(server.prompts) == 3:
            threading.Thread(target=die).start()
            return Bad(drop=True)
        return f"said {prompt}"

    def die() -> None:
        server.stop()
        time.sleep(0.4)
        server.back()

    with Scripted(script) as server:
        speaker = Server(server.url, at_once=2, retry=QUICK)
        found = dict(gather(lambda text: speaker.say(text, 7), [*"abcde"], speaker.at_once))
    assert found == {n: f"said {letter}" for n, letter in enumerate("abcde")}
    assert len(server.prompts) >= 6


def test_a_whole_reading_survives_a_bad_server(tmp_path: Path) -> None:
    """Every third request fails in one of four ways; the answer and the tree are the same."""
    ways = [Bad(500), Bad(429, (("Retry-After", "0"),)), Bad(drop=True), Bad(wait=0.6)]
    text = "".join(f"Line {n} of a long text that is read by someone. " for n in range(400))

    def good(prompt: str) -> str:
        if "MOST LIKELY" in prompt:
            return "Reasoning: x\nAction: 1"
        return "Action: -2\nAnswer: 7" if "Main text:" in prompt else prompt[-400:-300] + "."

    def bad(prompt: str) -> str | Bad:
        return ways[len(server.prompts) // 3 % 4] if len(server.prompts) % 3 == 0 else good(prompt)

    walks = []
    for script in (good, bad):
        with Scripted(script) as server:
            speaker = Server(server.url, at_once=3, timeout=0.25, retry=QUICK)
            walks.append(read(text, "What?", speaker, fanout=3))
    assert walks[0] == walks[1] and walks[0].text == "7"


def test_the_first_error_ends_it() -> None:
    def script(prompt: str) -> str | Bad:
        return Bad(400, body=b'{"error": "no"}') if prompt == "3" else "fine"

    with Scripted(script) as server:
        speaker = Server(server.url, at_once=2)
        with pytest.raises(UserError, match="status 400"):
            texts = map(str, range(100))
            dict(gather(lambda text: speaker.say(text, 7), texts, speaker.at_once))
        time.sleep(0.1)
        assert len(server.prompts) < 20, "those that waited were not asked"


def test_a_server_that_was_never_there_is_told_at_once() -> None:
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"no server answers at http://127\.0\.0\.1:\d+/v1"):
        Server(f"http://127.0.0.1:{free_port()}/v1")
    assert time.monotonic() - begun < 5


def test_a_server_that_is_still_loading_is_waited_for() -> None:
    with Scripted(lambda prompt: "fine", models=Bad(503)) as server:

        def ready() -> None:
            server.models = None

        threading.Timer(0.2, ready).start()
        assert Server(server.url, retry=QUICK).name == MODEL


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"<html>", b"[]", b'"x"', b"{}", b"[" * 100_000, b"\xff", b'{"choices": []}'),
        *(b'{"choices": [{"message": 7}]}', b'{"choices": [{"message": {"content": {"a": 1}}}]}'),
    ],
)
def test_what_is_no_reply_is_told(body: bytes) -> None:
    with Scripted(lambda prompt: Bad(body=body)) as server:
        with pytest.raises(UserError, match="replied with"):
            Server(server.url, retry=HASTY).say("?", 7)
        assert len(server.prompts) == 1


def test_a_reply_without_words_is_empty_and_an_endless_one_is_not_read() -> None:
    with Scripted(lambda prompt: Bad(body=b'{"choices": [{"message": {"content": null}}]}')) as s:
        assert Server(s.url).say("?", 7) == ""
    with Scripted(lambda prompt: Bad(body=b'{"a": "' + b"x" * (MAX_REPLY + 9) + b'"}')) as s:
        with pytest.raises(UserError, match="replied with"):
            Server(s.url).say("?", 7)


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 401, 404, 422])
def test_what_is_refused_is_not_tried_again_nor_followed_elsewhere(status: int) -> None:
    with Scripted(lambda prompt: "stolen") as other:
        headers = (("Location", f"{other.url}/chat/completions"),)
        with Scripted(lambda prompt: Bad(status, headers, b"no")) as server:
            with pytest.raises(UserError, match=f"refused a request \\(status {status}, 'no'\\)"):
                Server(server.url).say("?", 7)
            assert len(server.prompts) == 1
        assert not other.paths


def test_no_proxy_gets_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scripted(lambda prompt: "stolen") as proxy, Scripted(lambda prompt: "fine") as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert Server(server.url).say("?", 7) == "fine"
        assert not proxy.paths


def test_a_model_is_named_where_there_are_several() -> None:
    several = {"data": [{"id": "a"}, {"id": "b/c", "max_model_len": 2048}, {"no": 1}, 7]}
    with Scripted(lambda prompt: "fine", models=several) as server:
        with pytest.raises(UserError, match=r"has 2 models \('a', 'b/c'\): name one after a #"):
            Server(server.url)
        chosen = Server(f"{server.url}#b/c")
        assert (chosen.name, chosen.window) == ("b/c", 2048)
        assert Server(f"{server.url}#b/c", window=512).window == 512
        assert Server(f"{server.url}#not%20listed").name == "not listed"
        chosen.say("?", 7)
        assert server.asked[0]["model"] == "b/c"
    for none in ({"data": []}, {}, {"data": None}, {"data": "x"}):
        with Scripted(lambda prompt: "fine", models=none) as server:
            with pytest.raises(UserError, match=r"has 0 models \(none\)"):
                Server(server.url)
    for broken in (Bad(500), Bad(404), Bad(body=b"<html>")):
        with Scripted(lambda prompt: "fine", models=broken) as server:
            assert Server(f"{server.url}#m").say("?", 7) == "fine"
            with pytest.raises(UserError):
                Server(server.url, retry=HASTY)


def test_fingerprints_tell_models_apart_and_outlive_a_restart() -> None:
    def printed(models: Callable[[], object] | None, server: Scripted, name: str = "") -> str:
        server.models = models and models()
        return Server(f"{server.url}{name}").fingerprint

    def listed(**more: object) -> Callable[[], object]:
        return lambda: {"data": [{"id": "m", **more}]}

    with Scripted(lambda prompt: "fine") as server:
        first = printed(listed(created=1), server)
        assert first == printed(listed(created=2), server), "when it started is no matter"
        others = [
            printed(listed(root="/models/x"), server),
            printed(listed(meta={"n_params": 7, "size": 9}), server),
            printed(listed(meta={"n_params": 8, "size": 9}), server),
            printed(listed(), server, "#other"),
        ]
        assert len({first, *others}) == 5


@pytest.mark.parametrize(
    "url",
    [
        *("", "model", "ftp://127.0.0.1/v1", "http://", "http://:80/v1", "http://127.0.0.1:x/v1"),
        *("http://127.0.0.1:99999/v1", "http://a b/v1", "http://[::1/v1", "http://127.0.0.1\n/v1"),
        *("http://me:word@127.0.0.1/v1", "http://127.0.0.1/v1?key=1", "http://127.0.0.1/v1é"),
        "file:///etc/passwd",
    ],
)
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(UserError, match="is no URL of a server"):
        Server(url)


def test_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="1 request or more"):
        Server("http://127.0.0.1:1/v1", at_once=0)
    with Scripted(lambda prompt: "fine") as server:
        with pytest.raises(UserError, match=r"can't be reached.*SSL"):
            Server(f"https://127.0.0.1:{server.port}/v1")

    def unknown(*args: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"can't be reached \(Name or service not known\)"):
        Server("http://name.invalid/v1")


def test_a_text_has_no_more_tokens_than_it_is_taken_for() -> None:
    with Scripted(lambda prompt: "fine") as server:
        speaker = Server(server.url)
    assert speaker.size("") == 0 and speaker.size("a") == 1
    assert speaker.size("词" * 100) == 100  # a letter of three bytes is a token or two at most
    assert speaker.size("\ud800") > 0
    assert json.loads(json.dumps("\ud800")) == "\ud800"
