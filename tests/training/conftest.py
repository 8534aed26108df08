"""A small text, a small run and a Llama of two layers: training takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longitude.training.data import Corpus, gather
from longitude.training.distributed import World
from longitude.training.lab.model import DecoderConfig
from longitude.training.lab.run import Run
from tests.hf.conftest import heard as heard

CPU = World(torch.device("cpu"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths."""
    path = tmp_path_factory.mktemp("text")
    for n in range(12):
        lines = [f"{n} green bottles and {i * n} more, line {i}." for i in range(20 * (n + 1))]
        (path / f"{n}.txt").write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def corpus(folder: Path) -> Corpus:
    return gather([str(folder)])


def small(corpus: Corpus, scheme: str = "rope()", **options: Any) -> Run:
    """A run that takes a second."""
    config = DecoderConfig(scheme, length=32, layers=2, dim=16, heads=2, hidden=32)
    settings = {"steps": 8, "batch": 4, "rate": 1e-2, **options}
    return Run(config, corpus.fingerprint, **settings)


@pytest.fixture(scope="session")
def llama_weights() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def llama(llama_weights: Any) -> Any:
    """Random weights, grouped heads, no dropout; a copy for each test."""
    import copy

    return copy.deepcopy(llama_weights)
