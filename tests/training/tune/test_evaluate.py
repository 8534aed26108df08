"""What training changed, told from rows whose numbers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from longitude.eval.records import CONTEXT, Measurement
from longitude.training.tune.evaluate import next_steps, numbers, summarise
from longitude.training.tune.run import Tuned
from tests.measured import OWN, answered, context, document, kept, row

TUNED = Tuned(
    "tiny-rope", "runs/a", "runs/a/model", "adapter", {"name": "pi", "family": "rope"},
    "rope(frequencies=linear(4))", 256, 1024, 300, 1.5, 1000.0, 60.0,
)  # fmt: skip
BEFORE = (3.0, 3.1, 3.2)


def rows(after: Sequence[float], before: Sequence[float] = BEFORE) -> list[Measurement]:
    """Three documents at the target, and at the window of the model as it is."""
    found = [*context(OWN, 256, (1.0, 1.1, 1.2)), *context(OWN, 1024, (4.0, 4.1, 4.2))]
    found += context("before", 1024, before) if before else []
    return [*found, *context("after", 1024, after)]


@pytest.mark.parametrize(
    ("after", "word", "helps"),
    [
        ((1.2, 1.3, 1.4), "helped", True),
        ((2.0, 2.1, 2.2), "helped, but not enough: its loss is over half a nat above the "
         "baseline's in its window", False),
        ((3.5, 3.6, 3.7), "made it worse", False),
        ((1.0, 3.1, 5.0), "made no significant difference", False),  # the interval holds zero
    ],
)  # fmt: skip
def test_the_word_is_that_of_the_paired_numbers(
    after: tuple[float, ...], word: str, helps: bool
) -> None:
    summary = summarise(rows(after), TUNED)
    assert summary["best"]["sentence"].startswith(f"300 steps of pi {word}. ")
    assert summary["helps"] is helps and summary["best"]["label"] == "after"
    assert f"is {sum(after) / 3:.3f} (" in summary["best"]["sentence"]
    assert "Before training the loss was 3.100 (change" in summary["best"]["sentence"]


def test_a_model_under_its_own_scheme_is_judged_by_itself() -> None:
    sentence = summarise(rows((1.2, 1.3, 1.4), ()), TUNED)["best"]["sentence"]
    assert sentence.startswith("300 steps of pi helped. ") and "Before training" not in sentence
    assert "4.100" in sentence and "baseline" in sentence


def test_what_was_kept_and_answered_is_told() -> None:
    more = [kept(OWN, 256, (0.2, 0.21, 0.19)), kept("before", 1024, (0.1, 0.11, 0.12))]
    more += [kept("after", 1024, (0.3, 0.31, 0.32)), answered("after", 1024, [0.1] * 4)]
    best = summarise([*rows((1.2, 1.3, 1.4)), *more], TUNED)["best"]
    sentence = best["sentence"]
    assert "At 1,024 tokens it keeps 31 % (95 % CI 29–33) of far context" in sentence
    assert "Effective length 1,024 tokens" in sentence and "100 % (95 % CI 51–100) of" in sentence
    assert sentence.endswith("and it kept 11 % of far context (change +20 to +20 points).")
    assert best["numbers"]["effective_length"] == 1024


@pytest.mark.parametrize(
    ("after", "word"),
    [
        ((3.5, 3.6, 3.7), "helped by loss of the answers, and made it worse by loss of the same "
         "last tokens. "),
        ((3.0, 3.1, 3.3), "helped by loss of the answers, but not enough: its loss is over half a"),
    ],
)  # fmt: skip
def test_more_answers_are_told_with_what_they_cost(after: tuple[float, ...], word: str) -> None:
    more = [answered("before", 1024, [2.0, 2.1, 2.2, 2.3]), answered("after", 1024, [0.1] * 4)]
    summary = summarise([*rows(after), *more], TUNED)
    sentence = summary["best"]["sentence"]
    assert sentence.startswith(f"300 steps of pi {word}") and not summary["helps"]
    assert "and the loss of the answers was 2.150 (change -2.2" in sentence  # what was named


def test_without_a_number_nothing_is_judged() -> None:
    lost: dict[str, Any] = {"refused": "out of memory at 1024 tokens."}
    found = [*rows((), BEFORE), row(CONTEXT, "after", 1024, lost, text=document(0))]
    summary = summarise(found, TUNED)
    assert "can't be judged" in summary["best"]["sentence"] and not summary["helps"]


def test_numbers_of_every_way() -> None:
    found = numbers(rows((2.0, 2.1, 2.2)), TUNED.target)
    assert set(found) == {"baseline", "before", "after"}
    assert found["after"]["context"]["1024"]["mean"] == pytest.approx(2.1)
    assert set(found["baseline"]["context"]) == {"256", "1024"}


def test_what_to_type_next() -> None:
    assert "longitude export runs/a/model" in dict(next_steps(TUNED))["Serve it"]
    grown = replace(TUNED, recipe={"name": "learned", "family": "learned"})
    assert "lh.save(model" in dict(next_steps(grown))["Merge it"]
    assert {*dict(next_steps(replace(grown, kind="checkpoint")))} == {
        "Use it in Python",
        "Compare it with every method",
    }
