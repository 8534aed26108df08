"""Losses in nats per token: of a document's first n tokens, of those past the window, and of the
same last tokens with growing context.

One forward at the greatest length gives the loss at every position, binned on a log scale, and so
the mean over the first n tokens, and from the window's end to n, for every shorter n. A scheme
whose frequencies depend on the total length is run once for each length.

The context's loss (Su, kexue.fm/archives/9708) scores the last tokens of a document with n tokens
in all, for each n. The targets never change, so a lower loss at a greater n is due to the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longitude.eval.records import CONTEXT, LOSS, PAST_WINDOW, ResultKey
from longitude.eval.tasks import Metric, Session, Value


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """Means over the first tokens, over those past the window, and over bins of positions."""
    from longitude.eval.perplexity import by_position, losses

    rows = []
    for key in keys:
        ids, window = session.document(key).first(key.length), key.subject.trained
        per_token = losses(session.model, ids)
        session.cache["losses"] = ids, per_token  # the context metric scores the same tokens
        doubles, lengths = per_token.double(), key.protocol["lengths"]
        means = [[n, float(doubles[:n].mean())] for n in lengths]
        past = [[n, float(doubles[window:n].mean())] for n in lengths if n > window]
        bins = [list(b) for b in by_position(per_token[None])]
        rows.append({"means": means, "past": past, "bins": bins})
    return rows


def measure_context(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """The mean loss of the last tokens."""
    import torch

    from longitude.eval.perplexity import tail_losses

    rows = []
    for key in keys:
        ids = session.document(key).last(key.length)
        scored = min(key.protocol["tail"], key.length)
        cached_ids, per_token = session.cache.pop("losses", (None, None))
        if cached_ids is None or not torch.equal(cached_ids, ids):
            per_token = tail_losses(session.model, ids, scored)
        rows.append({"loss": float(per_token[-scored:].double().mean())})
    return rows


SHARED: dict[str, Any] = {
    "unit": "nats per token", "better": "lower", "per": "document", "selectable": False,
    "seeded": False,
}  # fmt: skip
BY_POSITION = SHARED | {"measure": measure, "rows": LOSS, "covers_shorter": True}
METRICS = (
    Metric(
        name=LOSS,
        title="Loss of the first tokens",
        help="Nats per token of a document's first tokens, by length and by position.",
        field="means",
        chart="Where a line rises past the trained window, the method loses the text there.",
        order=20,
        **BY_POSITION,
    ),
    Metric(
        name=PAST_WINDOW,
        title="Loss past the window",
        help="Nats per token of a document, over all positions from the window's end to a length.",
        field="past",
        heading="loss past window",
        order=21,
        **BY_POSITION,
    ),
    Metric(
        name=CONTEXT,
        title="Loss of the same last tokens",
        help="Nats per token of the same last tokens, with more and more text before them.",
        measure=measure_context,
        paper="Su 2023, kexue.fm/archives/9708",
        field="loss",
        settings=lambda protocol: {"tail": protocol.scored_tokens},
        heading="loss",
        chart="A useful method goes down: more context, lower loss of the very same tokens.",
        order=22,
        **SHARED,
    ),
)
