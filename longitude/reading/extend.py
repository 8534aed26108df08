"""The full text in one row, under a scheme that was measured at that length.

Nothing is cut: the model is patched with the scheme while it answers. Without a scheme it is the
unmodified model.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from longitude.hf.patch import patched
from longitude.reading.forward import Rows
from longitude.reading.generate import Answer, Tell, encode, generate_answer, prompt


class Source:
    """One row, without windows to trace."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def first(self) -> Float[Tensor, " v"]:
        return self.rows.first()[0]

    def next(self, token: int) -> Float[Tensor, " v"]:
        return self.rows.next(token)[0]

    def trace(self, index: int) -> dict[str, Any]:
        return {}


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
    """Answer from the full text, under another scheme if one is given.

    Args:
        chat: use the tokenizer's chat template; by default if there is one.
        tell: called with each step as it comes.
        options: transformers' own for `generate`: do_sample, temperature, stopping_criteria, ….
    """
    layout = prompt(tokenizer, question, chat=chat)
    row = layout.row(encode(tokenizer, text))
    options |= {"max_new_tokens": max_new_tokens}
    # what depends on the length is fixed before the first token, as `generate` does
    length = len(row) + max_new_tokens
    with nullcontext() if scheme is None else patched(model, scheme, length=length):
        source = Source(Rows(model, [row]))
        return generate_answer("extend", model, tokenizer, source, layout, 1, tell, options)
