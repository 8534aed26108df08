"""From tokens to an answer: what every way of reading many windows does with its source."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from longitude.hf.reading.generate import generated
from longitude.hf.streaming.spell import Speller
from longitude.read.answer import Answer, Step, Tell, gathered
from longitude.read.prompt import Prompt


@runtime_checkable
class Traced(Protocol):
    """A source that remembers where each token came from."""

    def first(self) -> Float[Tensor, " v"]: ...
    def next(self, token: int) -> Float[Tensor, " v"]: ...
    def seen(self, index: int) -> dict[str, Any]:
        """The fields of a step for the token of this index."""
        ...


def said(
    by: str,
    model: nn.Module,
    tokenizer: Any,
    source: Traced,
    layout: Prompt,
    windows: int,
    tell: Tell | None,
    options: dict[str, Any],
) -> Answer:
    """The answer that `generate` makes of a source, each step told as it comes."""
    steps: list[Step] = []
    speller = Speller(tokenizer, layout.tail[-1])

    def add(step: Step) -> None:
        steps.append(step)
        if tell is not None:
            tell(step)

    def come(token: int) -> None:
        add(Step(token, speller.add(token), **source.seen(len(steps))))

    generated(model, source, list(layout.tail), come, **options)
    if rest := speller.rest():
        add(Step(None, rest))
    return gathered(by, steps, windows)
