"""Loss by position: nats per token of a document's first n tokens, and of those past the window.

One forward at the greatest length gives the loss at every position, binned on a log scale, and so
the mean over the first n tokens, and from the window's end to n, for every shorter n. A scheme
whose frequencies depend on the total length is run once for each length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longitude.eval.records import LOSS, PAST_WINDOW, ResultKey
from longitude.eval.tasks import Metric, Session, Value


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """Means over the first tokens, over those past the window, and over bins of positions."""
    from longitude.eval.perplexity import by_position, losses

    rows = []
    for key in keys:
        ids, window = session.document(key).first(key.length), key.subject.trained
        per_token = losses(session.model, ids)
        session.cache["losses"] = ids, per_token  # the context metric scores the same tokens
        wide, lengths = per_token.double(), key.protocol["lengths"]
        means = [[n, float(wide[:n].mean())] for n in lengths]
        past = [[n, float(wide[window:n].mean())] for n in lengths if n > window]
        bins = [list(b) for b in by_position(per_token[None])]
        rows.append({"means": means, "past": past, "bins": bins})
    return rows


SHARED: dict[str, Any] = {
    "measure": measure, "rows": LOSS, "unit": "nats per token", "better": "lower",
    "per": "document", "selectable": False, "covers_shorter": True, "seeded": False,
}  # fmt: skip
METRICS = (
    Metric(
        name=LOSS,
        title="Loss of the first tokens",
        help="Nats per token of a document's first tokens, by length and by position.",
        field="means",
        chart="Where a line rises past the trained window, the method loses the text there.",
        order=20,
        **SHARED,
    ),
    Metric(
        name=PAST_WINDOW,
        title="Loss past the window",
        help="Nats per token of a document, over all positions from the window's end to a length.",
        field="past",
        heading="loss past window",
        order=21,
        **SHARED,
    ),
)
