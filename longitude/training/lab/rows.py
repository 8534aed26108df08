"""The lab's results as plain values without torch, for the tables and the charts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

TEXT = "text"  # the one task that is scored by its loss: lower is better
Stretch = tuple[int, int, float]  # first position, past the last, mean loss


@dataclass(frozen=True)
class Score:
    """How one trained model did on one task at one length. `value` is the mean loss of the last
    tokens (text, in nats a byte) or the share of exact answers (other tasks), or None with the
    reason in `refused`. `curve` is the loss by position."""

    scheme: str
    label: str
    seed: int
    task: str
    trained: int
    length: int
    value: float | None
    refused: str | None = None
    curve: tuple[Stretch, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"curve": [[*stretch] for stretch in self.curve]}
