"""Shared by the tests of reading: a checkpoint, loaded once, and transformers' warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import longitude.hf as lh


@pytest.fixture(scope="session")
def tiny_rope() -> Any:
    """The bundled tiny-rope with its tokenizer."""
    return lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)


@pytest.fixture
def transformers_warnings() -> Iterator[list[str]]:
    """The warnings of transformers while a test runs."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Handler(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
