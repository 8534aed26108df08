"""Loss of the same last tokens with growing context: whether more text before them helps.

Su, kexue.fm/archives/9708: the last tokens of a document are scored with n tokens in all, for each
n. The targets never change, so a lower loss at a greater n is the context's doing.
"""

from __future__ import annotations

from collections.abc import Sequence

from longitude.eval.records import CONTEXT, ResultKey
from longitude.eval.tasks import Metric, Session, Value


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """The mean loss of the last tokens."""
    import torch

    from longitude.eval.perplexity import tail_losses

    rows = []
    for key in keys:
        ids = session.document(key).last(key.length)
        scored = min(key.protocol["tail"], key.length)
        known, per_token = session.cache.pop("losses", (None, None))
        if known is None or not torch.equal(known, ids):
            per_token = tail_losses(session.model, ids, scored)
        rows.append({"loss": float(per_token[-scored:].double().mean())})
    return rows


METRIC = Metric(
    name=CONTEXT,
    title="Loss of the same last tokens",
    unit="nats per token",
    better="lower",
    paper="Su 2023, kexue.fm/archives/9708",
    measure=measure,
    help="Nats per token of the same last tokens, with more and more text before them.",
    field="loss",
    per="document",
    selectable=False,
    settings=lambda protocol: {"tail": protocol.scored_tokens},
    seeded=False,
    heading="loss",
    chart="A useful method goes down: more context, lower loss of the very same tokens.",
    order=22,
)
