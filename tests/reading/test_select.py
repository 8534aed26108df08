"""Which way `--by auto` takes: what was measured first, then what suits the answer."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from longitude.core.validate import UserError
from longitude.eval.records import Subject
from longitude.reading.api import ReadOptions, read
from longitude.reading.documents import bm25, excerpt, most_relevant
from longitude.reading.select import Choice, Extension, choose, prior_runs, required_extension

SUBJECT = Subject("owner/model", "abc", "rope()", "rope", 256, "float32", "cpu")
CASE: Any = {"need": 2000, "answer": 16, "windows": 9, "trained": 256, "chats": True}
GOOD = Extension("runs/a", "rerope(128)", "rope(remap=rerope(128))", 2048, 0.9)
POOR = Extension("runs/b", "streaming(4, 252)", "rope(remap=streaming(4, 252))", 4096, 0.2)


def write_run(folder: Path, subject: Subject, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    rows = [{"key": {"kind": "extend", "subject": asdict(subject)}, "value": {}, "made": "2026"}]
    rows += [{"key": {"kind": "lm_eval"}, "value": {}, "made": "2026"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = {"label": GOOD.label, "scheme": GOOD.scheme, "numbers": {"length": 2048, **changes}}
    (folder / "recommendation.json").write_text(json.dumps({"best": best, "helps": True}))
    return folder


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"need": 256, "extensions": (GOOD,)}, "extend"),
        ({"extensions": (POOR, GOOD)}, "extend"),
        ({"extensions": (POOR, GOOD), "need": 2049}, "nbce"),
        ({"extensions": (GOOD,), "need": 5000}, "nbce"),
        ({"windows": 3}, "windows"),
        ({}, "nbce"),
        ({"answer": 65}, "memwalker"),
        ({"answer": 65, "chats": False}, "nbce"),
        ({"trained": None, "need": 100, "windows": 1}, "windows"),
    ],
)
def test_what_auto_takes(changes: dict[str, Any], by: str) -> None:
    found = choose(**CASE | changes)
    assert found.by == by and found.why and not found.why.endswith(".")
    extended = by == "extend" and found.why.startswith("the text fits rerope")
    assert found.extension == (GOOD if extended else None)


def test_it_says_what_it_knows() -> None:
    assert choose(**CASE, extensions=(GOOD,)) == Choice(
        "extend",
        "the text fits rerope(128), measured to 2,048 tokens in runs/a, where it retrieves 90% "
        "of passkeys",
        GOOD,
    )
    passed = choose(**CASE, extensions=(POOR,)).why
    assert "not enough: streaming" in passed and passed.endswith("retrieves 20% of passkeys")


def test_the_nearest_length_that_holds_the_text() -> None:
    longer = replace(GOOD, length=8192, run="runs/c")
    unasked = replace(GOOD, length=16384, passkeys=None)
    for need, measured, best in (
        (2000, (longer, GOOD), GOOD),
        (3000, (POOR, longer, GOOD), longer),
        (9000, (unasked, GOOD), unasked),
    ):
        assert choose(**CASE | {"need": need, "extensions": measured}).extension == best


def test_asking_for_an_extension() -> None:
    assert required_extension((POOR,), 2000, "m") == POOR  # it was asked for
    with pytest.raises(UserError, match=r"run `longitude extend m --to 2000` first"):
        required_extension((), 2000, "m")
    with pytest.raises(UserError, match=r"measured to 2,048 only"):
        required_extension((GOOD,), 2100, "m")


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(UserError, match=r"auto, nbce, windows, memwalker, extend, but got 'nbec'"):
        read(["book.txt"], "Who?", options=ReadOptions(by="nbec"))


def test_runs_of_the_model_are_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "model-2048", SUBJECT, passkey={"mean": 0.75})
    found = [replace(GOOD, run=str(run), passkeys=0.75)]
    assert prior_runs(tmp_path / "runs", SUBJECT) == found
    assert prior_runs(run, SUBJECT) == found  # the run itself
    assert prior_runs(tmp_path / "nowhere", SUBJECT) == []
    half = replace(SUBJECT, name="/home/me/model", weights="abd", dtype="bfloat16")
    assert prior_runs(run, half) == found  # the same model in another precision
    for other in (
        replace(SUBJECT, weights="abd"),
        replace(half, name="other"),
        replace(half, trained=512),
        replace(half, revision="main"),
    ):
        assert prior_runs(run, other) == []


@pytest.mark.parametrize("goal", ["short", "stream"])
def test_a_run_with_another_goal_is_read_by_what_it_advises_for_a_longer_context(
    tmp_path: Path, goal: str
) -> None:
    """Its own advice is measured inside the window, or forgets."""
    file = write_run(tmp_path / "a", SUBJECT) / "recommendation.json"
    own = {"own": "baseline"}
    best = {"what": goal, "label": POOR.label, "scheme": POOR.scheme, "numbers": {"length": 256}}
    context = {"what": "context", "label": GOOD.label, "scheme": GOOD.scheme}
    context["numbers"] = {**own, "length": 2048, "passkey": {"mean": 0.9}}
    file.write_text(json.dumps({"best": best, "helps": True, "goals": [context]}))
    assert prior_runs(tmp_path, SUBJECT) == [replace(GOOD, run=str(tmp_path / "a"))]
    nothing = {**context, "label": None, "scheme": None, "numbers": own}
    file.write_text(json.dumps({"best": best, "helps": True, "goals": [nothing]}))
    assert prior_runs(tmp_path, SUBJECT) == []


def test_a_run_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    two = write_run(tmp_path / "two", SUBJECT)
    other = json.dumps({"key": {"kind": "extend", "subject": asdict(SUBJECT) | {"weights": "x"}}})
    (two / "rows.jsonl").write_text((two / "rows.jsonl").read_text() + other + "\n")
    for name, text in {
        "unfinished": None,
        "cut": '{"best": {"label"',
        "list": "[1, 2]",
        "empty": "{}",
        "nothing": '{"best": {"label": null, "scheme": null, "numbers": {}}, "helps": false}',
        "strange": '{"best": {"label": 1, "scheme": 2, "numbers": {"length": "x"}}, "helps": true}',
        "deep": "[" * 100_000,
        "bytes": "\udcff",
    }.items():
        run = write_run(tmp_path / name, SUBJECT)
        (run / "recommendation.json").unlink()
        if text is not None:
            data = text.encode(errors="surrogateescape")
            (run / "recommendation.json").write_bytes(data)
    (write_run(tmp_path / "rows", SUBJECT) / "rows.jsonl").write_text("no rows\n")
    assert prior_runs(tmp_path, SUBJECT) == []


def test_scores_are_the_papers_formula() -> None:
    texts = ["the key is here the key", "nothing here", "a KEY"]
    sizes = [6, 2, 2]
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))  # two of three texts have the word
    expected = [
        idf * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * n / (10 / 3)))
        for f, n in zip([2, 0, 1], sizes, strict=True)
    ]
    assert bm25(texts, "Key? key!") == pytest.approx(expected)


def test_the_most_telling_stand_in_order() -> None:
    texts = [f"filler number {n}" for n in range(50)]
    texts[40], texts[7] = "The pass key is 4711.", "a key, not the pass"
    assert most_relevant(texts, "What is the pass key?", 2) == [7, 40]
    assert most_relevant(texts, "Warum?", 3) == [0, 1, 2]
    assert most_relevant(["天氣", "鑰匙是五", "海"], "鑰匙?", 1) == [1]
    assert most_relevant(texts, "key", 100) == [*range(50)]


def test_the_part_that_tells() -> None:
    text = "A ship came.\nThe pass was cold. The pass key is 4711! Nobody knew."
    assert excerpt(text, "What is the pass key?") == "The pass key is 4711! Nobody knew."
    assert excerpt(text, "What is the pass key?", 8) == "The pass"
    assert excerpt(text, "Warum?") == text and excerpt("word", "x") == "word"


def test_windows_that_cannot_be_joined_are_not_chosen() -> None:
    found = choose(**CASE, joins=False)
    assert found.by == "nbce" and "can't be joined" in found.why
