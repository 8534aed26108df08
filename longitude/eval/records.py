"""One measurement of one method, as it stands in the store: what was asked, and what came out.

The key is everything that decides the numbers (the model, the scheme, the length, the text, the
protocol, the seed); the value holds the numbers, and beside them what they cost. Standard library
only: the report reads these where no torch is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from longitude.core.store import Row, Store

KIND = "extend"
LOSS, CONTEXT, PASSKEY, COST = "loss", "context", "passkey", "cost"
KEYS, VARIABLES = "keys", "variables"
BASELINE = "baseline"  # the label of the model's own scheme


@dataclass(frozen=True)
class Subject:
    """The model that is measured: its weights (by digest), its own scheme and trained window."""

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
    """A document, cut to as many tokens as are read of it."""

    name: str
    digest: str


@dataclass(frozen=True)
class ResultKey:
    """What decides a measurement's numbers. `at` is its place in a grid (a passkey's depth), and
    `protocol` how it is taken: every count and cut that another run could choose otherwise."""

    measure: str
    subject: Subject
    scheme: str
    length: int
    text: Text | None = None
    at: Mapping[str, float] = field(default_factory=dict)
    protocol: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The key of its row in the store."""
        return {"kind": KIND, **asdict(self)}


@dataclass(frozen=True)
class Measurement:
    """A measurement and its numbers.

    Fields of the value by measure: loss has `means` ([n, mean loss of the first n tokens] …) and
    `bins` ([first, past, mean loss] …, over positions); context has `loss`, of the last tokens;
    passkey, keys and variables have `right`, a list of true and false; cost has `prefill` (tokens a
    second), `decode` (milliseconds a token) and `peak` (bytes). All have `label`, `seconds`,
    `machine`, and `refused`: a sentence where there are no numbers, otherwise None.
    """

    key: ResultKey
    value: Mapping[str, Any]
    made: str = ""

    @property
    def label(self) -> str:
        """The method's short name; older stores call the baseline otherwise."""
        return BASELINE if self.is_baseline else str(self.value["label"])

    @property
    def refused(self) -> str | None:
        return self.value.get("refused")

    @property
    def is_baseline(self) -> bool:
        return self.key.scheme == self.key.subject.scheme


def read(row: Row) -> Measurement:
    """A row of the store as a measurement."""
    key = dict(row.key)
    text = key.pop("text")
    key.pop("kind")
    subject = Subject(**key.pop("subject"))
    measured = ResultKey(subject=subject, text=text and Text(**text), **key)
    return Measurement(measured, row.value, row.made)


def recorded(store: Store) -> Iterator[Measurement]:
    """Every measurement that a store has."""
    return (read(row) for row in store.rows(kind=KIND))


def of(found: Iterable[Measurement], measure: str) -> list[Measurement]:
    """Those of one measure."""
    return [one for one in found if one.key.measure == measure]
