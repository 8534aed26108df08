"""What a terminal shows of where an answer came from, and what it must not be shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from longitude.reading.documents import Document, Piece
from longitude.reading.generate import Step
from longitude.viz.reading import by_path, by_windows
from longitude.viz.text import safe_lines


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain text\n\tin lines", "plain text\n\tin lines"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]0;title\x07bell\x08", "]0;titlebell"),
        ("one\r\ntwo\rover", "one\ntwoover"),
        ("\x9b2J\x7f", "2J"),
        ("a\u202eb\u2066c", "abc"),
        ("no\u00a0break\u2028line", "no break line"),
        ("👩\u200d🚀 می\u200cروم", "👩\u200d🚀 می\u200cروم"),
        ("half \ud800", "half \ufffd"),
    ],
)
def test_what_a_terminal_would_obey_is_left_out(said: str, shown: str) -> None:
    assert safe_lines(said) == shown


def lines(show: object, *args: object) -> list[str]:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(*args, console)  # type: ignore[operator]
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_windows_are_told_by_their_share_of_the_tokens() -> None:
    steps = [
        Step(1, " 4", 1, 0.25, (0.5, 0.25, 2.0)),
        Step(2, "7\n", 1, 0.1, (0.3, 0.1, 0.05)),
        Step(3, "!", 0, 0.0, (0.0, 1.0, 1.0)),
        Step(None, "."),
    ]
    windows = [
        Piece(Document(f"log{n}.txt", "\n" * n + f"words [b]{n}[/b]"), n, n + 14) for n in range(3)
    ]
    told = [line.split() for line in lines(by_windows, steps, windows, "words")]
    assert ["“", "4”", "2", "0.250", "next:", "window", "1,", "0.500"] in told
    assert ["“7↵”", "2", "0.100", "next:", "window", "3,", "0.050"] in told
    assert [row[:2] for row in told if row[0] == "window"] == [["window", "2"], ["window", "1"]]
    assert ["window", "2", "████████", "67%", "log1.txt,", "line", "2"] in told
    assert ["words", "[b]1[/b]"] in told  # no markup of ours


def test_a_step_through_a_tree() -> None:
    visit = {"place": [0, 2], "action": "down", "to": 1, "answer": "", "invalid": ["what?\x07"]}
    visit["reasoning"] = "it is\nthere \x1b[1m"
    assert lines(by_path, visit, "log.txt, lines 1–9") == [
        "  ↓ 1.3 (log.txt, lines 1–9) descends to part 2",
        "      it is there [1m",
        "      (invalid) what?",
    ]
    empty = {"place": [], "to": None, "reasoning": "", "answer": "no\x1b", "invalid": []}
    for action, told in {
        "revert": "  ↩ root (log) goes back",
        "answer": "  ✓ root (log) answers: no",
        "invalid": "  ✗ root (log) gave no valid reply",
    }.items():
        assert lines(by_path, empty | {"action": action}, "log") == [told]
