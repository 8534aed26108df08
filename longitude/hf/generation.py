"""From logits to text: sampling, incremental detokenization, and chat turns.

Nucleus sampling, Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration",
arXiv:1904.09751: draw from the fewest tokens whose probabilities sum to p or more. Draws are made
on the CPU, so that a seed means the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longitude.core.validate import UserError, shown

INCOMPLETE = "\ufffd"  # what a tokenizer writes for a part of a character
MAX_PENDING = 8  # tokens to wait for the rest of a character
ANSWER = "LONGITUDE-ANSWER"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 takes the most likely token; without a seed, draws
    differ from run to run."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"a temperature is 0 (the most likely token) or more, but got "
                f"{shown(self.temperature)}: use 0 to 1.5."
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"top_p is a probability, but got {shown(self.top_p)}: use 0.9, or 1 for all."
            )

    def rng(self) -> torch.Generator:
        """Return a random generator for one generation."""
        rng = torch.Generator()
        if self.seed is None:
            rng.seed()
        else:
            rng.manual_seed(self.seed)
        return rng

    def choose(self, logits: Float[Tensor, " v"], rng: torch.Generator) -> int:
        """Choose one token."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = (logits.double().cpu() / self.temperature).softmax(-1)
        probabilities, tokens = probabilities.sort(descending=True, stable=True)
        mass = probabilities.cumsum(-1) - probabilities  # before each token; the first always stays
        nucleus = probabilities * (mass < self.top_p)
        return int(tokens[torch.multinomial(nucleus, 1, generator=rng)])


class Detokenizer:
    """Incremental detokenizer; `before` is the token that precedes the first one.

    A character may take several tokens, and a token's text may depend on the one before it (a
    space, most often). So each piece is what the pending tokens add to the text of earlier ones.
    """

    def __init__(self, tokenizer: Any, before: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.ids = [] if before is None else [before]
        self.emitted = len(self.ids)

    def add(self, token: int) -> str:
        """Return the text that is final once this token has arrived."""
        self.ids.append(token)
        pending = len(self.ids) - self.emitted < MAX_PENDING
        return "" if pending and self._text(self.ids).endswith(INCOMPLETE) else self.rest()

    def rest(self) -> str:
        """Return the text not emitted yet, even if its last character is incomplete."""
        new = self._text(self.ids)[len(self._text(self.ids[: self.emitted])) :]
        if len(self.ids) > self.emitted:
            self.ids = self.ids[self.emitted :]
            self.emitted = len(self.ids)
        return new

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class Chat:
    """The turns of one chat, as text for the model.

    A chat template renders a full conversation, but a stream has read the earlier turns already and
    may have evicted them. So the template renders a short conversation with a known answer, and the
    text after that answer, including its end marker, is fed.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the checkpoint's tokenizer has no chat template, so it can't chat: use --complete."
            )
        self.tokenizer, self.begun = tokenizer, False

    def next(self, message: str) -> str:
        """Return the text to feed for the next user message, up to where the answer begins. It
        includes the end marker of the last answer, which must not have been fed."""
        turn = {"role": "user", "content": message}
        past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
        text = self.tokenizer.apply_chat_template(
            [*(past if self.begun else []), turn], tokenize=False, add_generation_prompt=True
        )
        if not self.begun:
            self.begun = True
            return text
        _, separator, rest = text.partition(ANSWER)
        if not separator:
            raise UserError(
                "the checkpoint's chat template leaves out earlier answers, so a chat can't go on "
                "turn by turn: use --complete."
            )
        return rest
