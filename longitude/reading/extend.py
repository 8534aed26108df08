"""The full text in one row, under a scheme that was measured at that length.

Nothing is cut: the model is patched with the scheme while it answers. Without a scheme it is the
unmodified model.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from longitude.hf.patch import patched
from longitude.reading.forward import Rows
from longitude.reading.generate import Answer, Prompt, Source, answer_by


def answer(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    question: str,
    scheme: str | None = None,
    *,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """Answer from the full text, under another scheme if one is given; other options are those of
    `generate.answer_by`."""

    def build(layout: Prompt, ids: list[list[int]]) -> Source:
        row = layout.row(ids[0])
        if scheme is not None:
            # what depends on the length is fixed before the first token, as `generate` does
            stack.enter_context(patched(model, scheme, length=len(row) + max_new_tokens))
        rows = Rows(model, [row])
        return lambda token: (rows(token)[0], {})

    options |= {"max_new_tokens": max_new_tokens, "inside_window": False}
    with ExitStack() as stack:
        return answer_by("extend", build, model, tokenizer, [text], question, **options)
