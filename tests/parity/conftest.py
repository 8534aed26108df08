"""transformers says many things while configurations are made at random; none matters here."""

from collections.abc import Iterator

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
