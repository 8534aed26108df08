"""The full text in one row, under a scheme that was measured at that length.

Nothing is cut: the model is patched with the scheme while it answers. Without a scheme it is the
unmodified model.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from longitude.hf.patch import patched
from longitude.reading.forward import Rows
from longitude.reading.generate import Answer, Tell, encode, generate_answer, prompt


def answer(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    question: str,
    scheme: str | None = None,
    *,
    chat: bool | None = None,
    tell: Tell | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> Answer:
    """Answer from the full text, under another scheme if one is given; for the other options see
    `generate.answer_by`."""
    layout = prompt(tokenizer, question, chat=chat)
    row = layout.row(encode(tokenizer, text))
    options |= {"max_new_tokens": max_new_tokens}
    # what depends on the length is fixed before the first token, as `generate` does
    length = len(row) + max_new_tokens
    with nullcontext() if scheme is None else patched(model, scheme, length=length):
        rows = Rows(model, [row])
        return generate_answer(
            "extend", model, tokenizer, layout, lambda t: (rows(t)[0], {}), 1, tell, options
        )
