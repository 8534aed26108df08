"""tiny-rope, loaded once for all tests of a plan."""

from __future__ import annotations

import pytest

from longitude.extension.measure import Evaluator
from longitude.extension.plan import ExtendOptions, Prepared, TargetModel, prepare


@pytest.fixture(scope="session")
def target() -> TargetModel:
    return TargetModel.load("tiny-rope", ExtendOptions(device="cpu"))


@pytest.fixture(scope="session")
def small(target: TargetModel) -> Prepared:
    """A plan that runs in seconds: three methods, two documents, two lengths."""
    methods = "leaky_rerope; dynamic_ntk"
    options = ExtendOptions(
        methods=methods, docs=2, search=True, questions=1, cost=False,
        tasks=("kept_context", "keys", "passkey"),
    )  # fmt: skip
    return prepare(target, "2x", options)


@pytest.fixture(scope="session")
def evaluator(small: Prepared) -> Evaluator:
    return Evaluator(small.plan, small.target, small.documents)
