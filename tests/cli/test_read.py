"""`longitude read`: the answer alone on stdout, where it came from, and mistakes in a line."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from longitude.eval.tasks.passkey import GARBAGE, KEY, QUESTION

from ..reading.scripted import Scripted
from .conftest import Ran

pytestmark = pytest.mark.usefixtures("_offline")
TEXT = f"{GARBAGE} " * 5 + f"\n{KEY.format(key=48213)}\n" + f"{GARBAGE} " * 5
ASK = ("-q", QUESTION, "--device", "cpu", "--dtype", "float32", "--max-tokens", "6")


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)  # no runs, and none of ours left behind
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def book(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return "book.txt"


def test_nbce_finds_the_key_and_says_where(longitude: Callable[..., Ran], book: str) -> None:
    code, out, err = longitude("read", book, *ASK, "--show")
    assert (code, out) == (0, "48213\n")
    assert "by nbce: the answer is short and the windows are many" in err
    rows = [line.split() for line in err.splitlines() if line.startswith("“")]
    assert ["“4”", "“8”", "“2”", "“1”", "“3”"] == [row[0] for row in rows[1:]]
    number = rows[1][1]
    told = err.splitlines()[-2]
    assert told.startswith(f"window {number} ") and told.endswith("book.txt, lines 1–3")


def test_data_is_all_of_it(longitude: Callable[..., Ran], book: str) -> None:
    code, out, err = longitude("read", book, *ASK, "--json")
    told = json.loads(out)
    assert code == 0 and told["answer"].strip() == "48213" and "by nbce" in err
    assert told["by"] == "nbce" and told["model"] == "tiny-rope" and told["question"] == QUESTION
    assert "".join(step["text"] for step in told["steps"]) == told["answer"]
    spans = [(window["start"], window["stop"]) for window in told["windows"]]
    assert spans[0][0] == 0 and spans[-1][1] == len(TEXT)
    start, stop = spans[told["steps"][1]["window"]]
    assert "48213" in TEXT[start:stop] and len(told["steps"][1]["entropies"]) == len(spans)


def test_quiet_is_the_answer_alone(
    longitude: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = io.TextIOWrapper(io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(sys, "stdin", given)
    assert longitude("read", "-", *ASK, "--quiet", "--by", "nbce") == (0, "48213\n", "")


def test_only_the_windows_with_the_questions_words(
    longitude: Callable[..., Ran], book: str
) -> None:
    code, out, err = longitude("read", book, *ASK, "--most-windows", "2")
    assert (code, out) == (0, "48213\n") and "\n2 of " in err and "--most-windows 0" in err


@pytest.mark.slow
def test_ten_megabytes_are_answered_from_a_few_windows(
    longitude: Callable[..., Ran], tmp_path: Path
) -> None:
    filler = f"{GARBAGE} " * 60_000
    text = f"{filler[:4_000_000]}\n{KEY.format(key=90817)}\n{filler}{filler[:1_000_000]}"
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    code, out, _ = longitude("read", "long.txt", *ASK, "--most-windows", "4", "--json")
    told = json.loads(out)
    assert code == 0 and len(text) > 10_000_000
    assert told["answer"].strip() == "90817" and len(told["windows"]) == 4


def test_windows_side_by_side_tell_their_attention(
    longitude: Callable[..., Ran], book: str
) -> None:
    asked = ("read", book, *ASK, "--by", "windows", "--most-windows", "2")
    code, out, err = longitude(*asked, "--show")
    assert (code, out) == (0, "48213\n") and "by their share of the attention" in err
    told = json.loads(longitude(*asked, "--json")[1])
    masses = [step["mass"] for step in told["steps"]]
    assert all(len(mass) == 2 and 0 < sum(mass) < 1 for mass in masses)
    rows = [line.split() for line in err.splitlines() if line.startswith("“4”")]
    number = masses[1].index(max(masses[1]))
    assert rows[0][1:3] == [str(number + 1), f"{max(masses[1]):.0%}"]
    assert rows[0][3][number] == "█"


def test_a_text_that_fits_is_read_as_it_is(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(KEY.format(key=31415) + "\n")
    (tmp_path / "b.md").write_text(GARBAGE)
    code, out, err = longitude("read", "a.txt", "b.md", *ASK)
    assert (code, out) == (
        0,
        "31415\n",
    ) and "fits the model's window of 256, so it is read unmodified" in err


SCHEME = "rope(remap=leaky_rerope(128, 16))"


def write_run(folder: Path, model: Any) -> None:
    """What `longitude extend tiny-rope` leaves, in short."""
    from longitude.extension.plan import describe

    folder.mkdir(parents=True)
    row = {"key": {"kind": "extend", "subject": asdict(describe(model, "x"))}, "value": {}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    numbers = {"length": 4096, "passkey": {"mean": 0.8}}
    best = {"label": "leaky_rerope(128, 16)", "scheme": SCHEME, "numbers": numbers}
    (folder / "recommendation.json").write_text(json.dumps({"best": best, "helps": True}))


def test_a_measured_extension_comes_first(
    longitude: Callable[..., Ran], book: str, tmp_path: Path
) -> None:
    from longitude.hf.loading import load
    from longitude.hf.patch import patched

    model, tokenizer = load("tiny-rope", device="cpu", dtype="float32", quiet=True)
    write_run(tmp_path / "runs" / "tiny-rope-4096", model)
    assert tokenizer is not None
    prompt = tokenizer(f"{TEXT}\n{QUESTION}", return_tensors="pt")
    with patched(model, SCHEME):
        made = model.generate(**prompt, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    expected = str(tokenizer.decode(made[0, prompt["input_ids"].shape[1] :]))
    code, out, err = longitude("read", book, *ASK, "--show")
    assert code == 0 and "by extend: the text fits leaky_rerope(128, 16), measured to 4,096" in err
    assert out == expected.lstrip().removesuffix("\n") + "\n"
    assert err.splitlines()[-1] == "read in full: book.txt, lines 1–3"
    told = json.loads(longitude("read", book, *ASK, "--by", "extend", "--json")[1])
    assert (told["answer"], told["scheme"], told["by"]) == (expected, SCHEME, "extend")


def test_draws_follow_the_seed(longitude: Callable[..., Ran], book: str) -> None:
    Path(book).write_text("It begins.\n")
    drawn = ["read", book, *ASK, "--temperature", "9", "--quiet", "--seed"]
    a, b, c = (longitude(*drawn, seed)[1] for seed in "112")
    assert a == b != c


@pytest.mark.parametrize(
    "args",
    [
        ("book.txt", "-q", ""),
        ("book.txt", "-q", " \n"),
        ("book.txt", "-q", "Wo\udcff?"),
        ("book.txt",),
        ("-q", "Who?"),
        ("none.txt", "-q", "Who?"),
        ("https://example.org/a.html", "-q", "Who?"),
        (".", "-q", "Who?"),
        ("binary", "-q", "Who?"),
        ("empty", "-q", "Who?"),
        ("book.txt", "-q", "Who?", "--by", "nbec"),
        ("book.txt", "-q", "Who?", "--by", "extend"),
        ("book.txt", "-q", "Who?", "--quiet", "--show"),
        ("book.txt", "-q", "Who?", "--window", "0"),
        ("book.txt", "-q", "Who?", "--window", "257"),
        ("book.txt", "-q", "Who?", "--max-tokens", "0"),
        ("book.txt", "-q", "Who?", "--max-tokens", "300"),
        ("book.txt", "-q", "Who?", "--temperature", "-1"),
        ("book.txt", "-q", "Who?", "--most-windows", "-1"),
        ("book.txt", "-q", "W" * 300),
        ("book.txt", "-q", "Who?", "--model", "no-such-folder"),
        ("book.txt", "-q", "Who?", "--model", "http://127.0.0.1:9/v1"),
        ("book.txt", "-q", "Who?", "--model", "http://127.0.0.1:9/v1", "--by", "nbce"),
        ("book.txt", "-q", "Who?", "--by", "memwalker"),
        ("book.txt", "-q", "Who?", "--by", "memwalker", "--temperature", "1"),
    ],
    ids=lambda args: " ".join(args)[:60],
)
def test_a_mistake_is_one_line(
    longitude: Callable[..., Ran], book: str, tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").write_bytes(b"")
    code, out, err = longitude("read", *args)
    assert (code, out) == (2, "")
    said = [line for line in err.splitlines() if not line.startswith("Using the bundled")]
    assert len(said) == 1 and said[0].startswith("longitude: ") and said[0].endswith(".")


def test_what_a_document_says_reaches_no_terminal(
    longitude: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longitude.reading import nbce
    from longitude.reading.generate import Answer, Step

    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    name = "\x1b[31mred\n.txt"
    (tmp_path / name).write_text(f"{evil} {TEXT}", encoding="utf-8")

    def answer(model: object, tokenizer: object, windows: list[str], *args: str, **more: object):
        steps = (Step(1, f"{evil}yes\r\n", 0, 0.5, (0.5, 0.7)), Step(2, "tab\t", 1, 0.1, (0.2,)))
        for step in steps:
            more["tell"](step)  # type: ignore[operator]
        return Answer("".join(s.text for s in steps), "nbce", steps, len(windows))

    monkeypatch.setattr(nbce, "answer", answer)
    code, out, err = longitude("read", name, *ASK, "--by", "nbce", "--show")
    assert (code, out) == (0, "]0;title[2J31myes\ntab\t\n")
    assert all(c.isprintable() or c == "\n" for c in err) and "[31mred .txt, line" in err
    code, out, err = longitude("read", name, *ASK, "--by", "nbce", "--json")
    assert code == 0 and json.loads(out)["answer"] == f"{evil}yes\r\ntab\t"
    assert all(ord(c) >= 0x20 or c == "\n" for c in out) and "\x9b" not in out


SECTIONS = [f"Section {n} begins. " + f"Nothing happens in section {n}. " * 80 for n in range(12)]


def reader(prompt: str) -> str:
    """A model that walks to section 7, goes back from where it is not, and answers there."""
    named = [*dict.fromkeys(re.findall(r"[Ss]ection (\d+)", prompt))]
    if "Summarize the above" in prompt or "Compress each" in prompt:
        return f"About {', '.join(f'section {n}' for n in named)}."
    if "MOST LIKELY" in prompt:
        offered = re.findall(r"^Summary (\d+): .*section 7\b", prompt, re.MULTILINE)
        return f"Reasoning: \x1b[2Jseven is here.\nAction: {offered[0] if offered else 0}"
    if "7" in named:
        return "Reasoning: it says so.\nAction: -2\nAnswer: under the \x1b[31mred\x1b[0m bridge"
    return "Reasoning: nothing.\nAction: -1"


def test_a_server_is_walked_with(longitude: Callable[..., Ran], tmp_path: Path) -> None:
    for n, name in enumerate(("one.txt", "two.md")):
        (tmp_path / name).write_text("\n".join(SECTIONS[6 * n : 6 * n + 6]), encoding="utf-8")
    asked = ("read", "one.txt", "two.md", "-q", "Where is it?", "--model")
    with Scripted(reader) as server:
        code, out, err = longitude(*asked, server.url, "--show")
        assert (code, out) == (0, "under the [31mred[0m bridge\n")
        assert "by memwalker: a server gives text, not logits." in err and "summaries" in err
        assert all(c.isprintable() or c == "\n" for c in err)
        *_, last, why = err.splitlines()
        assert last.lstrip().startswith("✓ ") and "two.md, line" in last and "bridge" in last
        assert why.strip() == "it says so."
        summaries = sum("Summarize" in prompt for prompt in server.prompts)
        told = json.loads(longitude(*asked, server.url, "--json")[1])
        assert sum("Summarize" in prompt for prompt in server.prompts) == summaries > 6  # kept
    assert told["found"] and told["by"] == "memwalker" and "two.md" in told["path"][-1]["where"]
    assert [*Path("runs").rglob("*.sqlite")]


def test_no_answer_is_an_exit_code_of_its_own(longitude: Callable[..., Ran], book: str) -> None:
    with Scripted(lambda prompt: "I can't say.") as server:
        asked = ("read", book, "-q", "Who?", "--model", server.url, "--out", "kept")
        assert longitude(*asked, "--quiet") == (1, "no answer\n", "")
        code, out, _ = longitude(*asked, "--json")
        assert code == 1 and json.loads(out)["found"] is False
