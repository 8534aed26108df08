"""Testing a trained model at lengths it never saw: loss on text, exact answers on tasks.

Text: the same excerpts at every length, cut from the front, so that the same last tokens are scored
with more and more before them. Tasks: fresh problems, each as large as the length holds; an answer
counts when every byte of it is the likeliest (which is what greedy decoding would say).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.core.validate import UserError
from longitude.eval.perplexity import by_position, tail, token_losses
from longitude.training.distributed import generator
from longitude.training.lab.model import Decoder
from longitude.training.lab.rows import TEXT
from longitude.training.lab.tasks import accuracy, task
from longitude.training.lab.text import Corpus, excerpts


@dataclass(frozen=True)
class Protocol:
    """How models are tested; a part of every record's key. `tail` tokens are scored of each
    excerpt; without it, half the trained window."""

    excerpts: int = 16
    problems: int = 64
    tail: int | None = None
    seed: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("excerpts", "problems"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, but got {getattr(self, name)}.")

    def plain(self) -> dict[str, Any]:
        """As it stands in a record's key."""
        return asdict(self)


class Examiner:
    """Tests one model; what it reads is made once for the greatest length."""

    def __init__(
        self, model: Decoder, corpus: Corpus | None, longest: int, protocol: Protocol, dtype: str
    ) -> None:
        self.model, self.protocol = model.eval(), protocol
        self.window = model.shape.length
        self.device = model.tokens.weight.device
        self.low = dtype == "bfloat16"
        count = protocol.excerpts
        self.text = corpus and excerpts(corpus, longest + 1, count, protocol.seed)

    def score(self, name: str, length: int) -> dict[str, Any]:
        """One row: a value, and for text its curve; or the sentence in which it was refused."""
        try:
            return self._text(length) if name == TEXT else self._task(name, length)
        except UserError as mistake:
            return {"value": None, "refused": str(mistake), "curve": []}

    def _text(self, length: int) -> dict[str, Any]:
        assert self.text is not None
        losses = token_losses(self._logits, self.text[:, -length - 1 :])
        last = self.protocol.tail or max(1, self.window // 2)
        curve = [list(stretch) for stretch in by_position(losses)]
        return {"value": tail(losses, min(last, length)), "refused": None, "curve": curve}

    def _task(self, name: str, length: int) -> dict[str, Any]:
        rng = generator(self.protocol.seed, length, f"test {name}")
        rows = task(name, self.window).rows(rng, self.protocol.problems, length, vary=False)
        size = max(1, 2**15 // length)
        said = [self._logits(part).argmax(-1).cpu() for part in rows.tokens[:, :-1].split(size)]
        return {"value": accuracy(torch.cat(said), rows), "refused": None, "curve": []}

    @torch.no_grad()
    def _logits(self, tokens: Int[Tensor, "b n"]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.low):
            return self.model(tokens.to(self.device))
