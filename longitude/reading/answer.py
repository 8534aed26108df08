"""An answer and where it came from: the text, token by token, with the windows each one used.

Every way of reading gives one of these. A `Step` is one token: which window it came from, and what
was seen of the others. Steps go to the caller's `tell` as they come, so that an answer streams; the
`Answer` holds all of them once it is whole.

From tokens to an answer: what every way of reading many windows does with its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn

from longitude.hf.generation import Detokenizer
from longitude.reading.generate import generated
from longitude.reading.prompt import Prompt


@dataclass(frozen=True)
class Step:
    """One token of an answer.

    `text` is what can be said once it has come: nothing while a letter is half spelled, and what a
    few tokens spell together once they are there. Joined, the texts of all steps are the answer.
    """

    token: int | None  # None for what was left to say after the last token
    text: str
    window: int | None = None  # the window it came from, counted from 0; None: from none of them
    entropy: float | None = None  # NBCE: the chosen window's, in nats
    entropies: tuple[float, ...] = ()  # NBCE: every window's
    mass: tuple[float, ...] = ()  # parallel windows: the share of attention each window got

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without what this way of reading does not know."""
        known = {"token": self.token, "text": self.text, "window": self.window}
        if self.entropy is not None:
            known |= {"entropy": self.entropy, "entropies": list(self.entropies)}
        return known | ({"mass": list(self.mass)} if self.mass else {})


@dataclass(frozen=True)
class Answer:
    """What was said, how it was found, and its trace."""

    text: str
    by: str  # "nbce", "windows", …
    steps: tuple[Step, ...] = ()
    windows: int = 0  # how many there were

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "answer": self.text,
            "by": self.by,
            "windows": self.windows,
            "steps": [step.plain() for step in self.steps],
        }


Tell = Callable[[Step], None]  # called with each step as soon as it is known


def gathered(by: str, steps: Iterable[Step], windows: int) -> Answer:
    """The answer that these steps make up."""
    steps = tuple(steps)
    return Answer("".join(step.text for step in steps), by, steps, windows)


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
    speller = Detokenizer(tokenizer, layout.tail[-1])

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
