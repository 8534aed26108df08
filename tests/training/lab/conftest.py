"""A small text and small runs, so that training takes a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longitude.training.distributed import World
from longitude.training.lab.config import Shape
from longitude.training.lab.run import Run
from longitude.training.lab.text import Corpus, gather

CPU = World(torch.device("cpu"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of twelve small files."""
    home = tmp_path / "text"
    home.mkdir()
    for n in range(12):
        words = " ".join(f"word{(n * k) % 17} and number {k * n};" for k in range(60))
        (home / f"page{n}.txt").write_text(words)
    return home


@pytest.fixture
def corpus(folder: Path) -> Corpus:
    return gather([str(folder)])


def small(corpus: Corpus, scheme: str = "rope()", **given: object) -> Run:
    """A run that takes a second."""
    shape = Shape(scheme, length=32, layers=2, dim=16, heads=2, hidden=32)
    settings = {"steps": 8, "batch": 4, "rate": 1e-2, **given}
    return Run(shape, corpus.fingerprint, **settings)  # type: ignore[arg-type]
