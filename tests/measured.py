"""Rows of measurements made up from numbers, for what is computed from rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longitude.eval.records import (
    BASELINE,
    CONTEXT,
    COST,
    KEPT,
    LOSS,
    RETRIEVAL,
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


def kept(scheme: str, length: int, shares: Sequence[float], round: int = 0) -> Measurement:
    """Kept context of a round, one share a document, of 10 nats each."""
    value = {"share": sum(shares) / len(shares), "stderr": 0.01, "keys": 10 * len(shares)}
    gains = [[10 * share, 10.0] for share in shares]
    return row(KEPT, scheme, length, {**value, "gains": gains}, at={"round": round})


def answered(
    scheme: str,
    length: int,
    losses: Sequence[float],
    exacts: Sequence[bool] | None = None,
    family: str = "passkey",
) -> Measurement:
    """The answers to a family of questions; right where the loss is under 0.5, if not said."""
    right = [loss < 0.5 for loss in losses] if exacts is None else [*exacts]
    value = {"family": family, "exact": sum(right) / len(right), "exacts": right}
    value |= {"loss": sum(losses) / len(losses), "losses": [*losses]}
    return row(RETRIEVAL, scheme, length, value, at={"family": family, "round": 0})


def cost(scheme: str, length: int, prefill: float) -> Measurement:
    return row(COST, scheme, length, {"prefill": prefill, "decode": 1e3 / prefill, "peak": 1000})
