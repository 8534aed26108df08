"""A training run as a value: all that decides which weights come out, and nothing else.

It stands in a run's config.json, it is the key under which a lab's rows are recorded, and two runs
with the same value are the same run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from longitude.core.validate import UserError
from longitude.training.lab.config import Shape

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Run:
    """A shape, its data, and how it is trained. `tasks` are names with their shares of a batch;
    `text` is the corpus's fingerprint; `batch` counts sequences over all processes."""

    shape: Shape
    text: str
    steps: int
    batch: int
    rate: float
    seed: int = 0
    tasks: tuple[tuple[str, float], ...] = (("text", 1.0),)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rate"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} must be above zero, but got {getattr(self, name)}.")
        if self.dtype not in DTYPES:
            raise UserError(f"no dtype is called {self.dtype!r}: use {' or '.join(DTYPES)}.")

    @property
    def warmup(self) -> int:
        """Steps until the learning rate stands at its height."""
        return min(200, self.steps // 10)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: up in a straight line, then down a cosine to a tenth."""
        if step < self.warmup:
            return self.rate * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def plain(self) -> dict[str, Any]:
        """As it stands in config.json and in a record's key."""
        return {**asdict(self), "tasks": [list(task) for task in self.tasks]}


def read(plain: dict[str, Any]) -> Run:
    """A run from what `plain` made of it."""
    tasks = tuple((name, float(share)) for name, share in plain["tasks"])
    return Run(**{**plain, "shape": Shape(**plain["shape"]), "tasks": tasks})


def shares(text: str) -> tuple[tuple[str, float], ...]:
    """Tasks and their shares of a batch, as in "text:3,passkey"; a share is 1 if not given."""
    found: dict[str, float] = {}
    for item in text.split(","):
        name, _, share = (part.strip() for part in item.partition(":"))
        try:
            found[name] = float(share or 1)
        except ValueError:
            raise UserError(f"--tasks: {share!r} is no number: write {name}:2.") from None
        if not name or not 0 < found[name] < math.inf:
            raise UserError(f"--tasks: {item!r} is no task with a share: write text:3,passkey:1.")
    return tuple(found.items())
