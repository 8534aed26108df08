"""How a window, the question and the beginning of the answer are laid out for a model.

Every row is `head + window + tail`, and the row without a context `head + tail`: so all windows
share the head, and NBCE's empty row still holds the question. Three layouts:

- a chat model: one user's turn with the window, an empty line and the question, as the tokenizer's
  template writes it; the tail ends where the assistant's answer begins;
- a base model: the window, a line break and the question, to be written on from. That is the
  passkey's form too: the bundled tiny models were trained on `…garbage\\nWhat is the pass key? The
  pass key is`, and write the key next.

A window is spelled letter by letter: what looks like a special token in a document is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longitude.core.validate import UserError, shown

MARK = "LONGITUDE-WINDOW"


@dataclass(frozen=True)
class Prompt:
    """The tokens around a window."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    def row(self, window: Sequence[int]) -> list[int]:
        """All of a prompt's tokens."""
        return [*self.head, *window, *self.tail]

    @property
    def around(self) -> int:
        """Tokens of a row that are not the window's."""
        return len(self.head) + len(self.tail)


def prompt(tokenizer: Any, question: str, *, chat: bool | None = None) -> Prompt:
    """The layout for a question; without a word about `chat`, a template decides."""
    if not question.strip():
        raise UserError(f"a question has words in it, but got {shown(question)}: ask something.")
    templated = bool(getattr(tokenizer, "chat_template", None))
    if chat and not templated:
        raise UserError("the checkpoint's tokenizer has no chat template: leave chat out.")
    return (
        _turn(tokenizer, question)
        if templated and chat is not False
        else _plain(tokenizer, question)
    )


def spelled(tokenizer: Any, text: str) -> list[int]:
    """A window's tokens, whatever it says."""
    return _ids(tokenizer, text, split_special_tokens=True)


def all_spelled(tokenizer: Any, windows: Sequence[str]) -> list[list[int]]:
    """The tokens of every window; none may be empty, for a trace counts them all."""
    if not windows:
        raise UserError("a text of at least one window is read, but got none: give some text.")
    ids = [spelled(tokenizer, window) for window in windows]
    if not all(ids):
        place = next(place for place, window in enumerate(ids) if not window)
        raise UserError(
            f"a window has text in it, but number {place} of {len(ids)} has none: drop it."
        )
    return ids


def check_fits(
    prompt: Prompt, windows: Sequence[Sequence[int]], new: int, trained: int | None
) -> None:
    """Raise where a window, the question and the answer are more than the model was trained on."""
    longest = max(map(len, windows))
    if trained is not None and longest + prompt.around + new > trained:
        raise UserError(
            f"a window of {longest} tokens, {prompt.around} around it and an answer of {new} are "
            f"more than the {trained} the model was trained on: use windows of "
            f"{max(0, trained - new - prompt.around)} tokens at most."
        )


def _plain(tokenizer: Any, question: str) -> Prompt:
    first = tokenizer.bos_token_id
    begins = tokenizer("a", verbose=False)["input_ids"][:1] == [first]
    return Prompt((first,) if begins else (), tuple(_ids(tokenizer, f"\n{question}")))  # type: ignore[arg-type]


def _turn(tokenizer: Any, question: str) -> Prompt:
    said = [{"role": "user", "content": f"{MARK}\n\n{question}"}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    before, found, after = text.partition(MARK)
    if not found:
        raise UserError(
            "the checkpoint's chat template leaves out what the user says: set chat=False."
        )
    return Prompt(tuple(_ids(tokenizer, before)), tuple(_ids(tokenizer, after)))


def _ids(tokenizer: Any, text: str, **how: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False, **how)["input_ids"]
