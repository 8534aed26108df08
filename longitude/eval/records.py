"""One measurement of one method, as a row of the store: what was measured, and what came out.

The key is everything that decides the numbers (model, scheme, length, text, protocol, seed); the
value holds the numbers and what they cost. Standard library only: the report reads rows where torch
may be missing. A `Score` is what the lab measured on a model that it trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from longitude.core.store import Row, Store

KIND = "extend"
LOSS, PAST_WINDOW, CONTEXT, COST = "loss", "past_window", "context", "cost"
KEPT, RETRIEVAL, ANSWER_LOSS = "kept_context", "retrieval", "answer_loss"
PASSKEY = "passkey"  # a family of retrieval
BASELINE = "baseline"  # the label of the model's own scheme
TEXT = "text"  # the only task of the lab that is scored by loss: lower is better
Stretch = tuple[int, int, float]  # first position, past the last, mean loss


@dataclass(frozen=True)
class Subject:
    """The model under test: its weights (by digest), its own scheme and trained window."""

    name: str
    weights: str
    scheme: str
    family: str  # rope, alibi or learned
    trained: int
    dtype: str
    device: str
    revision: str | None = None


@dataclass(frozen=True)
class Text:
    """A document, truncated to the tokens that are read."""

    name: str
    digest: str


@dataclass(frozen=True)
class ResultKey:
    """What decides a measurement's numbers. `at` is its cell in a grid (a round, a family of
    questions), and `protocol` every setting that another run could choose differently."""

    measure: str  # the `rows` of a metric
    subject: Subject
    scheme: str
    length: int
    text: Text | None = None
    at: Mapping[str, Any] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The key of the measurement's row in the store."""
        flat = vars(self) | {
            "subject": asdict(self.subject),
            "text": self.text and asdict(self.text),
        }
        return {"kind": KIND, **flat}  # deep copies of thousands of keys would take seconds


@dataclass(frozen=True)
class Measurement:
    """A measurement and its numbers.

    Fields of the value by metric: loss has `means` ([n, mean loss of the first n tokens] …),
    `past` (the same from the window's end on) and `bins` ([first, past, mean loss] …); context has
    `loss`, of the last tokens; kept_context has `share`, `stderr`, `keys` (how many key tokens) and
    `gains` ([nats, the baseline's nats] by document); retrieval has `family`, `exact` (the share of
    right answers) and `loss` (nats per token of the answers), with `exacts` and `losses` by
    question; cost has `prefill` (tokens per second), `decode` (milliseconds per token), `peak`
    (bytes) and `speed` (median, least and greatest ratio to the baseline's prefill). All have
    `label`, `seconds`, `machine`, and `refused`: why there are no numbers, otherwise None.
    """

    key: ResultKey
    value: Mapping[str, Any]
    made: str = ""

    @property
    def label(self) -> str:
        """The method's short name; older stores have another name for the baseline."""
        return BASELINE if self.is_baseline else str(self.value["label"])

    @property
    def refused(self) -> str | None:
        return self.value.get("refused")

    @property
    def is_baseline(self) -> bool:
        return self.key.scheme == self.key.subject.scheme


def from_row(row: Row) -> Measurement:
    """A row of the store as a measurement."""
    fields = {name: value for name, value in row.key.items() if name != "kind"}
    fields["subject"] = Subject(**fields["subject"])
    fields["text"] = fields["text"] and Text(**fields["text"])
    return Measurement(ResultKey(**fields), row.value, row.made)


def recorded(store: Store) -> Iterator[Measurement]:
    """Every measurement of a store."""
    return (from_row(row) for row in store.rows(kind=KIND))


def of(rows: Iterable[Measurement], measure: str) -> list[Measurement]:
    return [row for row in rows if row.key.measure == measure]


@dataclass(frozen=True)
class Score:
    """The score of one trained model on one task at one length. `value` is the mean loss of the
    last tokens (text, in nats per byte) or the share of exact answers (other tasks), or None, with
    the reason in `refused`. `curve` is the loss by position."""

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


def for_longer_context(advice: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a run recommends for a longer context, whatever its goal; None if nothing helps."""
    goals = [advice["best"], *advice.get("goals", ())]
    best = next((goal for goal in goals if goal.get("what") not in ("stream", "short")), goals[0])
    advised = best.get("scheme") and best["label"] != best["numbers"].get("own")
    helps = best is not goals[0] or advice.get("helps", True)
    return best if advised and helps else None
