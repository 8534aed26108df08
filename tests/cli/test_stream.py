"""`longitude stream`: chats, completes and scores, ends well, and says mistakes in a line."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from longitude.cli.generate import words

from .conftest import Ran

pytestmark = pytest.mark.usefixtures("_offline")
BOOK = "def main(argument):\n    return argument\n\n" * 10
TINY = ("stream", "tiny-rope", "--window", "60", "--device", "cpu", "--dtype", "float32")
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def says(longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run a command with this on standard input."""

    def call(said: str | bytes, *args: str) -> Ran:
        given = said.encode() if isinstance(said, str) else said
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        return longitude(*args)

    return call


@pytest.fixture
def chatting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model with a chat template."""
    from importlib import import_module

    file = import_module("longitude.hf.loading")  # longitude.hf.load itself is its function
    stock = file.load

    def load(*args: Any, **more: Any) -> Any:
        model, tokenizer = stock(*args, **more)
        tokenizer.chat_template = CHATML
        return model, tokenizer

    monkeypatch.setattr(file, "load", load)


def test_it_completes(says: Callable[..., Ran]) -> None:
    code, out, err = says(BOOK, *TINY, "--max-new-tokens", "20")
    assert code == 0 and 10 <= len(out) <= 21 and out.endswith("\n")
    chosen, told = err.splitlines()
    assert chosen.startswith("tiny-rope: LlamaForCausalLM")
    assert f"{len(BOOK) + 20:,} tokens, " in told and "tokens/s, " in told and "MiB kept" in told
    code, again, _ = says(BOOK, *TINY, "--max-new-tokens", "20", "--json")
    row = json.loads(again)
    assert row["text"] + "\n" == out and row["new_tokens"] == 20
    assert row["tokens"] == len(BOOK) + 20 and row["memory"] > 0 < row["tokens_per_second"]


def test_it_scores(says: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    block, book = 1024, BOOK * 3  # more than one block
    monkeypatch.setattr("longitude.cli.generate.BLOCK", block)
    code, out, _ = says(book, *TINY, "--score", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(rows) == -(-len(book) // block) > 1
    assert rows[-1]["tokens"] == len(book)
    assert rows[-1]["loss"] < rows[-1]["mean"] < rows[0]["loss"]  # it has seen the text before
    code, plain, _ = says(book, *TINY, "--score")
    assert plain.splitlines()[-1].split() == [
        *(f"{len(book):,}", "tokens", "loss", f"{rows[-1]['loss']:.4f}"),
        *("mean", f"{rows[-1]['mean']:.4f}"),
    ]


@pytest.mark.usefixtures("chatting")
def test_it_chats_a_line_an_answer(says: Callable[..., Ran]) -> None:
    said = "Hello\n\n  \nAgain\n"
    code, out, err = says(said, *TINY, "--max-new-tokens", "5", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["turn"] for row in rows] == [1, 2]
    first = len("<user>Hello</><assistant>")
    assert rows[0]["tokens"] == first + rows[0]["new_tokens"]
    more = len("</><user>Again</><assistant>")
    assert rows[1]["tokens"] == rows[0]["tokens"] + more + rows[1]["new_tokens"]
    code, plain, _ = says(said, *TINY, "--max-new-tokens", "5")
    assert code == 0 and plain == "".join(row["text"] + "\n" for row in rows)
    code, out, err = says("", *TINY)
    assert (code, out) == (0, "") and "\n0 tokens, " in err


def test_draws_follow_the_seed(says: Callable[..., Ran]) -> None:
    drawn = [*TINY, "--temperature", "3", "--max-new-tokens", "12", "--json", "--seed"]
    a, b, c = (json.loads(says(BOOK, *drawn, seed)[1])["text"] for seed in "112")
    assert a == b != c


def test_where_someone_looks_on_stdout_is_still_the_text_alone(
    says: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, plain, _ = says(BOOK, *TINY, "--max-new-tokens", "8")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert says(BOOK, *TINY, "--max-new-tokens", "8")[:2] == (code, plain)
    code, out, err = says(BOOK, *TINY, "--score")
    assert code == 0 and "\x1b" not in out and " loss " in out and "\x1b" in err


@pytest.mark.parametrize(
    "args",
    [
        ("tiny-rope",),
        ("tiny-rope", "--window", "0"),
        ("tiny-rope", "--window", "254"),
        ("tiny-rope", "--window", "200", "--sinks", "-1"),
        ("tiny-rope", "--window", "200", "--temperature", "-1"),
        ("tiny-rope", "--window", "200", "--top-p", "2"),
        ("tiny-rope", "--window", "200", "--chunk", "0"),
        ("tiny-rope", "--window", "200", "--max-new-tokens", "-1"),
        ("tiny-rope", "--window", "200", "--chat"),
        ("tiny-rope", "--window", "200", "--chat", "--score"),
        ("tiny-rope", "--window", "200", "--dtype", "float31"),
        ("tiny-alibi", "--window", "200"),
        ("tiny-learned", "--window", "200"),
        ("no-such-folder",),
        ("README.md",),
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line(says: Callable[..., Ran], args: tuple[str, ...]) -> None:
    code, out, err = says("text", "stream", *args)
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if not line.startswith("tiny-")]  # what was loaded
    assert len(said) == 1 and said[0].startswith("longitude: ") and said[0].endswith(".")


def test_nothing_to_go_on_from(says: Callable[..., Ran]) -> None:
    code, out, err = says("", *TINY)
    assert (code, out) == (2, "") and "standard input was empty" in err
    for text, read in (("", 0), ("a", 1)):
        code, out, err = says(text, *TINY, "--score")
        assert (code, out) == (2, "") and f"but standard input had {read}: give more." in err


def test_interrupting_is_an_end_like_another(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(io.BytesIO):  # where it waits for more
        def read1(self, size: int | None = -1, /) -> bytes:
            return super().read1(size) or signal.raise_signal(signal.SIGINT) or b""

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Interrupted(BOOK.encode())))
    # a shell's background jobs ignore interrupts, and so would what they start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    code, out, err = longitude(*TINY, "--score")
    signal.signal(signal.SIGINT, before)
    told = err.splitlines()
    assert code == 130 and "tokens" in out
    assert len(told) == 2 and told[1].startswith("stopped: ") and "MiB kept" in told[1]


def test_a_text_is_cut_between_words_and_loses_nothing() -> None:
    text = "".join(f"word{i} 漢字é\n" if i % 7 == 0 else f"word{i} " for i in range(3000))
    whole = text.encode()
    pieces = list(words(whole[i : i + 1000] for i in range(0, len(whole), 1000)))
    assert "".join(pieces) == text and len(pieces) > 5
    assert all(a.endswith("\n") or b.startswith(" ") for a, b in pairwise(pieces))
    assert "".join(words([b"a" * 500, b"a" * 500 + b"\xff"])) == "a" * 1000 + "\ufffd"
    assert list(words([])) == []
