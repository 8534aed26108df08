"""The whole text in one row, read under a scheme that was measured to that length.

Nothing is cut: the model is patched with the scheme for as long as the answer takes, and reads as
it always does. Without a scheme it is the model itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from longitude.hf.patch import patched
from longitude.reading.answer import Answer, Tell, said
from longitude.reading.kv_rows import Rows
from longitude.reading.prompt import prompt, spelled


@dataclass(eq=False)
class Source:
    """One row, which has nothing to tell of windows."""

    rows: Rows

    def first(self) -> Float[Tensor, " v"]:
        return self.rows.first()[0]

    def next(self, token: int) -> Float[Tensor, " v"]:
        return self.rows.next(token)[0]

    def seen(self, index: int) -> dict[str, Any]:
        """Nothing: there is one text."""
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
    """What a model answers that reads the whole text, under another scheme if one is given.

    Args:
        chat: use the tokenizer's chat template; without a word, if there is one.
        tell: called with each step as it comes.
        options: transformers' own for `generate`: do_sample, temperature, stopping_criteria, ….
    """
    layout = prompt(tokenizer, question, chat=chat)
    row = layout.row(spelled(tokenizer, text))
    options |= {"max_new_tokens": max_new_tokens}
    # what follows the length is fixed before the first token, as `generate` does
    length = len(row) + max_new_tokens
    with nullcontext() if scheme is None else patched(model, scheme, length=length):
        source = Source(Rows(model, [row]))
        return said("extend", model, tokenizer, source, layout, 1, tell, options)
