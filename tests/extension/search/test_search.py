"""The whole search: what it finds holds on documents it never read, or the start is kept."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from random import Random
from statistics import fmean

import pytest
import torch

from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.tasks import metrics
from longitude.extension import search as module
from longitude.extension.measure import Clock, Evaluator, OutOfTime, Pace
from longitude.extension.search import UseOfContext, judge, search, smallest_budget, split_documents
from longitude.extension.search_space import curve_of
from longitude.parts import LongRope

L, N, HEAD = 256, 2048, 32
LEADERS = ["rope(remap=leaky_rerope(32, 32))", "rope(frequencies=yarn(8, original=256))"]


class Exam:
    """Leaky windows are best at 96, YaRN's factors at 12, and pair factors on a slope that none of
    the starts has."""

    def __init__(self, noise: float = 0.02, gain: float = 1.0, refuse: str = "(nothing)") -> None:
        self.noise, self.gain, self.refuse = noise, gain, refuse
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, scheme, documents):
        self.calls.append((scheme, tuple(documents)))
        return [self.loss(scheme, one) for one in documents]

    def loss(self, text: str, document: int) -> float:
        if self.refuse in text:
            return math.inf
        noise = Random(f"{text} {document}").gauss(0, self.noise)
        return 2 + document + (self.gain and self.gain * away(text)) + noise


@lru_cache(maxsize=10_000)
def away(text: str) -> float:
    rope = parse(text).rotary
    if rope.remap:
        return abs(math.log(rope.remap.window / 96))
    if isinstance(rope.frequencies, LongRope):
        slope = [math.log(8) / (1 + math.exp(4 - i / 2)) for i in range(16)]
        return math.dist(curve_of(text).logs, slope)
    return abs(rope.frequencies.factor - 12) / 4 if rope.frequencies.name == "yarn" else 1.0


def found_by(exam: Exam, seed: int = 0, budget: int = 450, own: str | None = "rope()"):
    return search(exam, LEADERS, L, N, HEAD, 16, budget, seed, own=own)


def test_documents_are_drawn_into_two_halves():
    searched, judged = split_documents(9, seed=3)
    assert sorted((*searched, *judged)) == list(range(9)) and len(judged) == 5
    assert split_documents(9, seed=3) == (searched, judged) != split_documents(9, seed=4)
    with pytest.raises(UserError, match="needs 4 documents beside"):
        split_documents(3, seed=0)


@pytest.mark.parametrize("seed", range(3))
def test_better_parameters_are_found_and_hold(seed):
    leaky, yarn, factors = found_by(Exam(), seed)
    assert leaky.start == LEADERS[0] and leaky.better
    assert parse(leaky.scheme).rotary.remap.window in range(76, 122)
    assert parse(yarn.scheme).rotary.frequencies.factor == pytest.approx(12, abs=1.5)
    assert factors.better and "longrope(" in factors.scheme and "longrope" not in factors.start
    for one in (leaky, yarn, factors):
        assert one.gain and one.gain.low > 0 and one.gain.n == 8 and one.tried > 10
    true = away(leaky.start) - away(leaky.scheme)
    assert leaky.gain.low - 0.02 <= true <= leaky.gain.high + 0.02


def test_the_search_never_reads_a_document_that_it_is_judged_on():
    exam = Exam()
    results = found_by(exam)
    judged = set(results[0].judged_documents)
    assert judged.isdisjoint(results[0].search_documents)
    for scheme, documents in exam.calls:
        of_a_result = any(scheme in (one.start, one.winner) for one in results)
        assert of_a_result or judged.isdisjoint(documents)
    # and each way's search was over before a judged document was read
    kinds = [bool(judged & set(documents)) for _, documents in exam.calls]
    assert sum(kinds) == 2 * len(results)
    searched = sum(len(d) for _, d in exam.calls if judged.isdisjoint(d))
    assert searched <= 450


def test_without_a_real_gain_the_start_is_kept():
    """Noise alone, which a search always finds something in: kept, but for one in forty."""
    results = [one for seed in range(8) for one in found_by(Exam(0.3, 0), seed, 160, None)]
    won = [one for one in results if one.winner != one.start]
    kept = [one for one in won if one.scheme == one.start and not one.better]
    assert len(won) > 8 and len(kept) >= len(won) - 2
    assert all(one.gain.low <= 0 for one in kept)


def test_the_same_seed_asks_the_same_in_the_same_order():
    exams = Exam(), Exam(), Exam()
    results = [found_by(exam, seed, 170) for exam, seed in zip(exams, (5, 5, 6), strict=True)]
    assert exams[0].calls == exams[1].calls != exams[2].calls
    assert results[0] == results[1]


def test_refused_schemes_are_survived():
    results = found_by(Exam(refuse="logn"))
    assert all("logn" not in one.scheme for one in results) and results[0].better
    for one in found_by(Exam(refuse="rope")):
        assert one.gain is None and one.scheme == one.start


def test_a_refused_start_is_left_for_what_works():
    found = judge(Exam(refuse="(32, 32)"), LEADERS[0], LEADERS[1], 9, [0, 1], [2, 3])
    assert found.gain is None and found.scheme == LEADERS[1] and found.better


def test_a_gain_on_one_document_is_none():
    found = judge(Exam(noise=0), LEADERS[0], "rope(remap=rerope(96))", 9, [0], [1])
    assert found.gain.mean > 1 and not found.better


def test_a_budget_that_is_too_small_says_what_is_needed():
    needed = smallest_budget(3, 16)
    with pytest.raises(UserError, match=f"needs {needed} losses"):
        found_by(Exam(), budget=needed - 1)
    exam = Exam()
    assert len(found_by(exam, budget=needed)) == 3
    assert sum(len(documents) for _, documents in exam.calls) <= needed + 2 * 3 * 8


def test_only_what_can_vary_is_searched():
    assert search(Exam(), ["nonsense(3)"], L, N, HEAD, 16, 0) == []
    layered, halting = "layers(rope() + window(16), rope())", "rope(frequencies=proportional(0.5))"
    for own in (layered, halting, "alibi()"):
        only = search(Exam(), LEADERS[1:], L, N, HEAD, 8, 40, own=own)
        assert [one.start for one in only] == LEADERS[1:]


def test_what_was_found_before_the_time_ended_stays():
    whole = found_by(Exam())

    class Ends(Exam):
        def loss(self, text: str, document: int) -> float:
            if "longrope" in text:  # the last branch
                raise OutOfTime
            return super().loss(text, document)

    assert found_by(Ends()) == whole[:-1] and len(whole) == 3


def test_news_names_what_is_searched():
    told = []
    search(Exam(), LEADERS, L, N, HEAD, 16, 300, progress=told.append, own="rope()")
    assert {event.stage.rsplit(": ", 1)[0] for event in told} == {*LEADERS, "factors"}
    assert all(0 <= event.done < event.total and event.job == "search" for event in told)


def test_a_scheme_is_scored_by_the_use_of_its_context(small, monkeypatch):
    evaluator = Evaluator(small.plan, small.target, small.held_out)
    with Store(":memory:") as store:
        score = UseOfContext(evaluator, store)
        near, far = "rope(remap=streaming(4, 60))", "rope(remap=rerope(64))"
        forgets, remembers = (
            [score(scheme, (0, 1)), score(scheme, (1,))] for scheme in (near, far)
        )
        assert forgets[0][1:] == forgets[1] and remembers[0][1:] == remembers[1]
        assert all(a > b for a, b in zip(forgets[0], remembers[0], strict=True))
        (kept,), answers = (
            score.rows(far, metrics()[n], 0) for n in ("kept_context", "answer_loss")
        )
        gain = sum(gain for gain, _ in kept["gains"]) / kept["keys"]
        assert remembers[0][0] == pytest.approx(fmean(a["loss"] for a in answers) - gain)
        monkeypatch.setattr(Evaluator, "values", None)  # what is recorded is not measured again
        assert UseOfContext(evaluator, store)(far, (0, 1)) == remembers[0]


def test_a_short_time_takes_fewer_losses_then_fewer_schemes(small, monkeypatch):
    evaluator, asked = Evaluator(small.plan, small.target, small.held_out), []
    leaders = ["rope(remap=rerope(64))", "rope(remap=rerope(128))"]
    monkeypatch.setattr(module, "search", lambda _, *given, own: asked.append((given, own)) or [])
    monkeypatch.setattr(UseOfContext, "seconds", lambda self: 5.0)
    n = len(small.held_out)
    one = 5.0 * (smallest_budget(1, n) + 2 * (n - n // 2))  # seconds of one branch
    for seconds in (None, 1e6, 3.5 * one, 1.5 * one, 0.9 * one):
        clock = seconds and Clock(time.monotonic() + seconds, Pace(1e-3, 0.0))
        with Store(":memory:") as store:
            assert module.search_parameters(evaluator, leaders, store, clock=clock) == []
    (without, plenty, *less), budgets = asked, [given[5] for given, _ in asked]
    assert plenty == without and without[1] == small.plan.subject.scheme
    assert budgets == sorted(budgets, reverse=True) and budgets[-1] < budgets[0]
    assert less[-1][1] is None and len(asked) == 4, "no time for factors, then for anything"


@pytest.mark.slow
def test_a_real_model_reads_further_than_from_a_bad_start():
    """tiny-rope at four times its window, from a window that is far too large."""
    from longitude.eval.perplexity import tail, token_losses
    from longitude.hf import load, patched
    from longitude.training.data import excerpts, gather

    model, _ = load("tiny-rope", device="cpu", dtype="float32", quiet=True)
    texts = excerpts(gather(), 1025, 12, seed=0)

    @torch.no_grad()
    def score(scheme, documents):
        with patched(model, parse(scheme)):
            return [
                tail(token_losses(lambda ids: model(ids).logits, texts[[one]]), 128)
                for one in documents
            ]

    (found,) = search(score, ["rope(remap=leaky_rerope(240, 2))"], 256, 1024, 32, 12, 90)
    assert found.better and found.gain.low > 0.1
