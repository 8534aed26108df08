"""Naive Bayes context extension (being written; the signature is what the command calls)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from longitude.read.answer import Answer, Tell


def answer(
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[str],
    question: str,
    *,
    tell: Tell | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """What the model answers, each window of the text in a row of its own.

    `options` are transformers' own for `generate`: do_sample, temperature, stopping_criteria, ….
    """
    raise NotImplementedError
