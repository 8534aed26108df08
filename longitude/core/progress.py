"""How far a long job is: the one value that every long-running function reports.

A function takes `progress: Progress = silent` and calls it with an `Event` now and then; the
command line passes its display (`cli/progress.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """`done` of `total` units of a job are finished; `stage` says what runs now. An event without a
    total is a message to the user."""

    stage: str  # "yarn(4): passkey at 2,048"
    done: float
    total: float
    job: str = ""  # "measure", "train rope()": a new name starts a new bar
    figures: Mapping[str, str] = field(default_factory=dict)  # shown beside it: {"loss": "1.234"}
    seconds_left: float | None = None  # estimated by the display if None


Progress = Callable[[Event], None]


def silent(event: Event) -> None:
    """Report nothing."""
