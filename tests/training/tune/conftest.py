"""A text of many lines and a Llama of two layers, for what is trained in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of different lengths."""
    path = tmp_path_factory.mktemp("text")
    for n in range(12):
        lines = [f"{n} green bottles and {i * n} more, line {i}." for i in range(20 * (n + 1))]
        (path / f"{n}.txt").write_text("\n".join(lines))
    return path


@pytest.fixture
def llama() -> Any:
    """Random weights, grouped heads, no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
