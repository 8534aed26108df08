"""A chat that never starts over: what a tokenizer's template adds for one more turn.

Templates write whole conversations, but a stream has read the earlier turns already and may have
forgotten them. So the template writes a short one with a known answer in it, and what follows that
answer, its end mark included, is what is fed.
"""

from __future__ import annotations

from typing import Any

from longitude.fields import Mistake

ANSWER = "LONGITUDE-ANSWER"


class Turns:
    """The turns of one chat, as text for the model."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise Mistake(
                "the checkpoint's tokenizer has no chat template, so it can't chat: complete "
                "(--complete)."
            )
        self.tokenizer, self.begun = tokenizer, False

    def next(self, said: str) -> str:
        """What to feed for the next thing said, up to where the answer begins. The end of the last
        answer is part of it: it must not have been fed."""
        message = {"role": "user", "content": said}
        if not self.begun:
            self.begun = True
            return self._written([message])
        past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        _, found, more = self._written([*past, message]).partition(ANSWER)
        if not found:
            raise Mistake(
                "the checkpoint's chat template leaves out earlier answers, so a chat can't go on "
                "turn by turn: complete (--complete)."
            )
        return more

    def _written(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
