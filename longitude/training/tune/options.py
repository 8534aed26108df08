"""The protocol of `longitude tune`: what is asked for, what is told on the way, what comes out.

Standard library only, so that a command line can be built without torch. `tune.run.run(asked,
tell)` does the work: it raises `UserError` for whatever is wrong before the first step, calls
`tell` with a `Step` now and then, and returns a `Tuned`.

A run's folder (`Asked.out`):

    tune.json                 the question: recipe as settled, model, text, seed
    checkpoint.safetensors    what is trained, its optimizer and the losses, while it trains
    training.json             the loss of every step, tokens a second, seconds
    training.png              the same as a picture
    model/                    what came out, for `longitude.hf.loading`: an adapter or a checkpoint
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

QUESTION, STATE, HISTORY, PICTURE, RESULT = (
    "tune.json", "checkpoint.safetensors", "training.json", "training.png", "model",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A user's wishes. None takes the recipe's own; no recipe takes what suits the model's kind.

    `scheme` is written as everywhere; who wants the recommendation of an `extend` run passes its
    scheme. `rows` counts sequences of a step over all processes, `length` tokens of one.
    """

    model: str = "tiny-rope"
    to: str = "4x"
    recipe: str | None = None
    scheme: str | None = None
    text: tuple[str, ...] = ()
    steps: int | None = None
    rows: int | None = None
    length: int | None = None
    rate: float | None = None
    warmup: int | None = None
    positions: str | None = None  # order, pose, pose(chunks), randomized
    trained: str | None = None  # lora or full
    rank: int | None = None  # of LoRA's matrices
    out: str = "runs/tuned"
    resume: bool = True
    save_every: int = 50  # steps
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    checkpointing: bool | None = None  # of gradients; None: on an accelerator
    revision: str | None = None
    trust_remote_code: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Step:
    """How far a run is: what a progress line shows and a board records."""

    step: int  # steps taken
    steps: int
    loss: float  # mean of the last steps
    rate: float  # the learning rate of the last step
    tokens_per_second: float
    seconds: float  # since this process began
    left: float  # seconds to go, as it looks

    def plain(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Tuned:
    """Result: `folder` opens with `longitude.hf.loading`, `base` is the model it began with."""

    base: str
    out: str
    folder: str
    kind: str  # adapter or checkpoint
    recipe: dict[str, Any]  # as settled, with its paper
    scheme: str  # that the result reads with, in full
    trained_to: int  # the base's own window
    target: int
    steps: int
    loss: float  # mean of the last steps
    tokens_per_second: float
    seconds: float
    weights: dict[str, int] = field(default_factory=dict)  # trained, and all
    losses: tuple[float, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For `--json`; the losses of each step stand in training.json."""
        return {name: value for name, value in asdict(self).items() if name != "losses"}
