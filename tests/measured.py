"""Rows of measurements made up from numbers, for what is computed from rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longitude.eval.records import (
    BASELINE,
    CONTEXT,
    COST,
    LOSS,
    Measurement,
    ResultKey,
    Subject,
    Text,
)

SUBJECT = Subject("a model", "digest", "rope()", "rope", 256, "float32", "cpu")
OWN = "rope()"


def row(measure: str, scheme: str, length: int, value: dict[str, Any], **asked: Any) -> Measurement:
    """One row; the untouched model's and every other's label come from its scheme."""
    named = {"label": BASELINE if scheme == OWN else scheme, "refused": None}
    made = asked.pop("made", "")
    return Measurement(
        ResultKey(measure, SUBJECT, scheme, length, **asked), {**named, **value}, made
    )


def document(index: int) -> Text:
    return Text(f"text {index}", f"digest {index}")


def context(scheme: str, length: int, losses: Sequence[float]) -> list[Measurement]:
    """The loss of the last tokens, one a document."""
    return [
        row(CONTEXT, scheme, length, {"loss": loss}, text=document(d))
        for d, loss in enumerate(losses)
    ]


def reading(scheme: str, length: int, means: Sequence[dict[int, float]]) -> list[Measurement]:
    """One reading a document, the mean loss of its first tokens by their number."""
    return [
        row(LOSS, scheme, length, {"means": [*map(list, m.items())], "bins": []}, text=document(d))
        for d, m in enumerate(means)
    ]


def asked(
    measure: str, scheme: str, length: int, right: Sequence[bool], depth: float = 0.5
) -> Measurement:
    """A cell of questions."""
    return row(measure, scheme, length, {"right": [*right]}, at={"depth": depth})


def cost(scheme: str, length: int, prefill: float) -> Measurement:
    return row(COST, scheme, length, {"prefill": prefill, "decode": 1e3 / prefill, "peak": 1000})
