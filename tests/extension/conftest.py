"""tiny-rope, loaded once for all tests of a plan."""

from __future__ import annotations

import pytest

from longitude.extension.prepare import Options, Prepared, prepare


@pytest.fixture(scope="session")
def small() -> Prepared:
    """A plan that runs in seconds: three methods, two documents, two lengths."""
    methods = "leaky_rerope; dynamic_ntk"
    return prepare(
        Options(to="2x", methods=methods, docs=2, apart=4, questions=1, quiet=True, cost=False)
    )
