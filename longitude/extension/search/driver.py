"""The search on a live model: its scores are measurements, recorded like all others.

Its documents are others than those of the comparison, half of them to search on and half to judge
on. What is scored is the loss of the last tokens at the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.documents import Document
from longitude.eval.records import CONTEXT, ResultKey
from longitude.extension.candidates import by_length, label
from longitude.extension.measure import Bench
from longitude.extension.plan import Method
from longitude.extension.search.halving import Found
from longitude.extension.search.run import least, search
from longitude.hf.patch import own_scheme

SEARCH = "search"  # the kind of its rows: no table is made of them
LEADERS = 2  # methods whose parameters are searched
READINGS = 48  # schemes on documents, for each way; more where more documents need them


def searched(
    bench: Bench,
    apart: Sequence[Document],
    leaders: Sequence[str],
    store: Store,
    seed: int,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """What the search found, as it stands in recommendation.json."""
    plan, config = bench.plan, bench.model.config
    heads = config.get_text_config()
    head_dim = getattr(heads, "head_dim", None) or heads.hidden_size // heads.num_attention_heads
    roots = [scheme for scheme in leaders[:LEADERS] if scheme != plan.subject.scheme]
    ways = len(roots) + 1
    found = search(
        scorer(bench, apart, store),
        roots,
        plan.subject.trained,
        plan.target,
        head_dim,
        len(apart),
        max(ways * READINGS, least(ways, len(apart))),
        seed,
        lambda round, of, text: tell(f"search {round}/{of}: {text}"),
        own=plan.subject.scheme,
    )
    return [_plain(one, bench) for one in found]


def scorer(
    bench: Bench, apart: Sequence[Document], store: Store
) -> Callable[[str, Sequence[int]], list[float]]:
    """The loss of a scheme on documents, from the store where it is recorded."""

    def score(text: str, documents: Sequence[int]) -> list[float]:
        return [_loss(bench, text, apart[d], store) for d in documents]

    return score


def _loss(bench: Bench, text: str, document: Document, store: Store) -> float:
    plan = bench.plan
    protocol = {"version": plan.protocol.version, "tail": plan.protocol.tail}
    asked = ResultKey(CONTEXT, plan.subject, text, plan.target, document.text, protocol=protocol)
    key = {**asked.to_json(), "kind": SEARCH}
    value = store.get(key)
    if value is None:
        value = bench.context(_method(bench, text), document, asked)
        store.put(key, value)
    return math.inf if value["refused"] else float(value["loss"])


def _method(bench: Bench, text: str) -> Method:
    try:
        scheme = parse(text)
    except UserError as mistake:  # of the search's making, not the user's
        raise ValueError(f"the search wrote {text!r}: {mistake}") from mistake
    return Method(label(scheme, own_scheme(bench.model)), text, text, by_length(scheme))


def _plain(found: Found, bench: Bench) -> dict[str, Any]:
    gain = None if found.gain is None else asdict(found.gain)
    return {
        "label": _method(bench, found.scheme).label,
        "scheme": found.scheme,
        "start": found.start,
        "better": found.better,
        "gain": gain,
        "tried": found.tried,
        "sentence": _sentence(found, bench),
    }


def _sentence(found: Found, bench: Bench) -> str:
    start, end = (_method(bench, text).label for text in (found.start, found.winner))
    judged = len(found.judged_documents)
    if found.gain is None:
        gone, kept = (start, end) if found.better else (end, start)
        return f"{gone} was refused on the documents to judge on: {kept} is what to use."
    told = (
        f"{found.gain.mean:+.4f} nats a token ({found.gain.low:+.4f} to {found.gain.high:+.4f}) "
        f"on {judged} documents that the search never saw, of {found.tried} tried"
    )
    if found.better:
        return f"{end} in place of {start} gains {told}."
    return f"no better than {start} was found: the nearest gains {told}."
