"""Tokens as text while they come: a piece is given out once no later token can change it.

A letter may take several tokens, and what a token spells may depend on the one before it (a space,
most often). So each piece is what a few tokens spell more than those before them did.
"""

from __future__ import annotations

from typing import Any

HALF = "\ufffd"  # what a tokenizer writes for a part of a letter
LONGEST = 8  # tokens that are waited for: more are no letter


class Speller:
    """Spells one run of tokens, piece by piece; `before` is the token that they follow."""

    def __init__(self, tokenizer: Any, before: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids = [] if before is None else [before]
        self.spelled = len(self.ids)

    def add(self, token: int) -> str:
        """What can be said once this token has come."""
        self.ids.append(token)
        waiting = len(self.ids) - self.spelled < LONGEST
        return "" if waiting and self._text(self.ids).endswith(HALF) else self.rest()

    def rest(self) -> str:
        """What has not been said yet, finished or not."""
        new = self._text(self.ids)[len(self._text(self.ids[: self.spelled])) :]
        if len(self.ids) > self.spelled:
            self.ids = self.ids[self.spelled :]
            self.spelled = len(self.ids)
        return new

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
