"""A budget: what is cut first, what never is, and that a plan fits by its own reckoning."""

from __future__ import annotations

import pytest

from longitude.core.validate import UserError
from longitude.eval.records import Text
from longitude.eval.tasks import EvalProtocol
from longitude.extension.measure import Pace, fit_budget, parse_seconds
from longitude.extension.plan import Method, Plan
from tests.measured import SUBJECT

METHODS = tuple(Method(f"m{n}", f"s{n}", f"s{n}" if n else None) for n in range(8))
TEXTS = tuple(Text(f"t{n}", f"d{n}") for n in range(4))
PLAN = Plan(SUBJECT, METHODS, (256, 512, 1024), TEXTS, EvalProtocol(scored_tokens=128, questions=4))
PACE = Pace(linear=1e-3, quadratic=1e-7, token=0.01)


def test_what_fits_is_left_alone():
    assert fit_budget(PLAN, PACE, 1e9) == (PLAN, [])


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.15, 0.05])
def test_a_plan_is_cut_until_it_fits(share):
    budget = PACE.plan(PLAN) * share
    plan, notes = fit_budget(PLAN, PACE, budget)
    assert PACE.plan(plan) <= budget and notes
    assert plan.methods[0].patch is None
    assert plan.lengths == PLAN.lengths and len(plan.methods) >= 4


def test_documents_outlast_questions_and_methods_outlast_documents():
    sizes = []
    for share in (0.9, 0.5, 0.2, 0.1, 0.03):
        plan, _ = fit_budget(PLAN, PACE, PACE.plan(PLAN) * share)
        sizes.append((plan.protocol.questions, len(plan.texts), len(plan.methods)))
    assert sizes == sorted(sizes, reverse=True)
    assert any(q < 4 and texts == 4 for q, texts, _ in sizes)
    assert all(texts < 4 for _, texts, methods in sizes if methods < 8)


def test_what_can_not_fit_is_told():
    plan, notes = fit_budget(PLAN, PACE, 1e-3)
    assert "even so it takes about" in notes[-1]
    assert len(plan.methods) == 4 and len(plan.texts) == 1


@pytest.mark.parametrize(("text", "want"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2H", 7200)])
def test_times_are_read(text, want):
    assert parse_seconds(text) == want


@pytest.mark.parametrize("text", ["", "0m", "-3", "soon", "5d"])
def test_no_time_is_told(text):
    with pytest.raises(UserError, match=r"--budget.*10m"):
        parse_seconds(text)
