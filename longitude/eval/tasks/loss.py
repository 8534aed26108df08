"""Loss by position: nats per token of a document's first n tokens, for every n.

One forward at the greatest length gives the loss at every position, binned on a log scale, and so
the mean over the first n tokens for every shorter n. A scheme whose frequencies depend on the total
length is run once for each length.
"""

from __future__ import annotations

from collections.abc import Sequence

from longitude.eval.records import LOSS, ResultKey
from longitude.eval.tasks import Metric, Session, Value


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """Means over the first tokens, and over bins of positions."""
    from longitude.eval.perplexity import by_position, losses

    rows = []
    for key in keys:
        ids = session.document(key).first(key.length)
        per_token = losses(session.model, ids)
        session.cache["losses"] = ids, per_token  # the context metric scores the same tokens
        means = [[n, float(per_token[:n].double().mean())] for n in key.protocol["lengths"]]
        rows.append({"means": means, "bins": [list(b) for b in by_position(per_token[None])]})
    return rows


METRIC = Metric(
    name=LOSS,
    title="Loss of the first tokens",
    unit="nats per token",
    better="lower",
    measure=measure,
    help="Nats per token of a document's first tokens, by length and by position.",
    field="means",
    per="document",
    selectable=False,
    covers_shorter=True,
    seeded=False,
    chart="Where a line rises past the trained window, the method loses the text there.",
    order=10,
)
