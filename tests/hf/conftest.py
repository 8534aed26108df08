"""Whatever transformers has to say is heard."""

import logging
from collections.abc import Iterator

import pytest


class Heard(logging.Handler):
    """Keeps the warnings that transformers logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The warnings of transformers while a test runs."""
    logger, handler = logging.getLogger("transformers"), Heard()
    logger.addHandler(handler)
    yield handler.said
    logger.removeHandler(handler)
