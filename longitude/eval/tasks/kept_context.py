"""Kept context: the share of distant text's information that a method uses (the stretch test).

Evidence E and target T are consecutive pieces of one document. Between them stands filler F from
another document; the control has other text O of E's length in E's place. Key tokens are those of T
that the baseline inside its window, without filler, predicts better with E than with O by more than
a nat; they are chosen once and shared by all methods. A method's share at a length is its own gain
on them, loss(O F T) - loss(E F T), over the baseline's gain without filler. That takes two forwards
per document and no instruction to follow, so that small base models can be measured.

After the key tokens of LongPPL (Fang et al. 2024, arXiv:2410.23771).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from longitude.core.validate import UserError
from longitude.eval.records import KEPT, ResultKey
from longitude.eval.stats import ratio, ratio_difference, ratio_stderr
from longitude.eval.tasks import EvalProtocol, Metric, Session, Value, percent

if TYPE_CHECKING:
    from torch import Tensor

MAX_TARGET, MIN_TARGET, MAX_EVIDENCE = 1024, 64, 8192  # tokens
KEY_GAIN, KEY_GAIN_BYTES = 1.0, 0.7  # nats; a byte carries less information than a token
BYTES = 512  # the largest vocabulary that counts as one of bytes


def settings(protocol: EvalProtocol) -> Value:
    """How long the evidence and the target are: 3/8 and 1/8 of the window."""
    target = min(MAX_TARGET, max(MIN_TARGET, protocol.window // 8))
    evidence = min(MAX_EVIDENCE, 3 * protocol.window // 8)
    return {"evidence": evidence, "target": target, "documents": protocol.stretches}


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """The gains of a round's documents at one length."""
    import torch

    from longitude.eval.perplexity import tail_losses

    rows = []
    for key in keys:
        target, first = key.protocol["target"], int(key.at["round"]) * key.protocol["documents"]
        chosen = range(first, first + key.protocol["documents"])
        cache_key = ("keys", *key.protocol.items(), first)
        if cache_key not in session.cache:
            with session.baseline():
                session.cache[cache_key] = [_key_tokens(session, key, index) for index in chosen]
        key_tokens: list[tuple[Tensor, float]] = session.cache[cache_key]
        if not (count := sum(int(mask.sum()) for mask, _ in key_tokens)):
            raise UserError(
                f"no token of {len(chosen)} documents is told by the text before it, so nothing "
                f"says what is kept: give other text with --text."
            )
        texts = [ids for i in chosen for ids in _texts(session, key, i, key.length)]
        losses = tail_losses(session.model, torch.stack(texts), target)
        with_evidence, without = losses[::2], losses[1::2]
        gains = [
            (float(gain[mask].double().sum()), base)
            for gain, (mask, base) in zip(without - with_evidence, key_tokens, strict=True)
        ]
        value = {"share": ratio(gains).mean, "stderr": ratio_stderr(gains), "keys": count}
        rows.append({**value, "gains": gains})
    return rows


def _key_tokens(session: Session, key: ResultKey, index: int) -> tuple[Tensor, float]:
    """Which tokens of a target its evidence predicts, and the baseline's gain on them."""
    from longitude.eval.perplexity import tail_losses
    from longitude.eval.prefill import text_config

    bytes_ = text_config(session.model).vocab_size <= BYTES
    evidence, other = _texts(session, key, index, None)
    losses = (tail_losses(session.model, ids, key.protocol["target"]) for ids in (other, evidence))
    without, with_evidence = losses
    gain = without - with_evidence
    mask = gain > (KEY_GAIN_BYTES if bytes_ else KEY_GAIN)
    return mask, float(gain[mask].double().sum())


def _texts(session: Session, key: ResultKey, index: int, length: int | None) -> tuple[Tensor, ...]:
    """E F T and O F T as tokens, of this length in all; without a length, E T and O T.

    E and T number `index` are cut from the texts in turn: each text gives one pair, then each a
    second, and so on. F and O come from other texts, which contain neither E nor T: F is the end of
    one, O has E's offset (modulo what fits) in another, or in the same one if there are two texts.
    """
    import torch

    evidence, target = key.protocol["evidence"], key.protocol["target"]
    bodies = [d.ids[d.special :] for d in session.documents]
    count, size = len(bodies), evidence + target
    if count < 2:
        raise UserError(
            "kept context takes filler from another document, but the text has one: give more with "
            "--text or --docs."
        )
    body, slot = bodies[index % count], index // count
    if (slot + 1) * size > len(body):
        raise UserError(
            f"the text has no {index + 1} documents of {size:,} tokens for kept context: give more "
            f"with --text, or fewer --docs."
        )
    e, t = body[slot * size : (slot + 1) * size].split((evidence, target))
    before = session.documents[0].ids[: session.documents[0].special]
    room = 0 if length is None else length - size - len(before)
    if room < 0:
        raise UserError(f"evidence and target take {size + len(before):,} tokens, not {length:,}.")
    filler = bodies[(index + 1) % count]
    f = filler[len(filler) - room :]
    other = bodies[(index + 2) % count] if count > 2 else filler
    start = slot * size % max(1, len(other) - evidence + 1)
    o = other[start : start + evidence]
    return tuple(torch.cat([before, first, f, t]) for first in (e, o))


METRIC = Metric(
    name=KEPT,
    title="Kept context",
    unit="share",
    better="higher",
    paper="after Fang et al. 2024 (LongPPL), arXiv:2410.23771",
    measure=measure,
    summarise=ratio,
    difference=ratio_difference,
    field="gains",
    repeated=True,
    settings=settings,
    help="The share of the evidence's benefit that survives a distance: text E helps to predict T "
    "right after it, and the gain on the tokens that it helps most is measured again with other "
    "text between the two, relative to the baseline's gain without any.",
    heading="kept",
    chart="The share of what far text tells that a method still uses. Above the dashed rule is "
    "more than the baseline keeps at its own window's end.",
    format=percent,
    order=5,
)
