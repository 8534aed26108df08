"""Retrieval: whether a question about the text is answered exactly, and the answer's loss.

Greedy decoding gives exactly the answer if and only if the likeliest token at every position of the
answer, given the right ones before it, is the answer's own. So one forward over text, questions and
answers gives exact match and the answers' loss, and nothing is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from longitude.eval.records import ANSWER_LOSS, RETRIEVAL, ResultKey
from longitude.eval.stats import matched, share
from longitude.eval.tasks import EvalProtocol, Metric, Session, Value, percent


def settings(protocol: EvalProtocol) -> Value:
    return {"prompts": protocol.prompts, "window": protocol.window}


def grid(protocol: EvalProtocol) -> list[Mapping[str, Any]]:
    return [{"family": name} for name in protocol.families]


def measure(session: Session, keys: Sequence[ResultKey]) -> list[Value]:
    """The answers of each family's questions at one length, in one round."""
    from longitude.eval.retrieval import answers, prompts

    results = {str(key.at["family"]): ([], []) for key in keys}
    first = keys[0]
    cache_key = (RETRIEVAL, first.seed, first.length, first.at["round"], *first.protocol.items())
    if (*cache_key, *results) not in session.cache:  # the same for every method
        session.cache[*cache_key, *results] = prompts(session, first, [*results])
    for family, exact, loss in answers(session.model, session.cache[*cache_key, *results]):
        results[family][0].append(exact)
        results[family][1].append(loss)
    return [
        {"family": family, "exact": fmean(exacts), "loss": fmean(losses)}
        | {"exacts": exacts, "losses": losses}
        for family, (exacts, losses) in results.items()
    ]


SHARED: dict[str, Any] = {
    "measure": measure, "rows": RETRIEVAL, "repeated": True, "settings": settings, "grid": grid,
    "selectable": False, "paper": "Hsieh et al. 2024 (RULER), arXiv:2404.06654",
}  # fmt: skip
METRICS = (
    Metric(
        name=RETRIEVAL, title="Retrieval", unit="share", better="higher", field="exacts",
        summarise=share, difference=matched, format=percent, order=7, **SHARED,
        help="The share of questions about the text that greedy decoding answers exactly, over all "
        "families of questions. Questions on one text follow each other, each after the right "
        "answers to those before it.",
        chart="The share of questions about the text that greedy decoding would answer exactly.",
    ),
    Metric(
        name=ANSWER_LOSS, title="Loss of the answers", unit="nats per token", better="lower",
        field="losses", order=8, heading="answer loss", **SHARED,
        help="Nats per token of the right answers, given everything before them: tells methods "
        "apart where exact match is all or nothing.",
    ),
)  # fmt: skip
