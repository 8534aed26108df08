"""The search after a comparison: better parameters for each leading scheme, factors per dimension.

Schemes are texts and documents are numbers: a loss comes from `score`, which records what it
measured and reads the record when a killed search is run again. The same seed asks for the same
losses in the same order. The documents are others than those of the comparison, half of them to
search on and half to judge on. What is scored at the target is whether the context is used, as
LongRoPE2's needle-driven perplexity does (Shang et al. 2025, arXiv:2502.20082): the loss of the
answers to questions about the text, less what evidence gains at that distance (the stretch test),
both in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from longitude.core.progress import Event, Progress, silent
from longitude.core.scheme import Scheme
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import ANSWER_LOSS, KEPT, ResultKey
from longitude.eval.tasks import Metric, metrics
from longitude.extension.candidates import by_length, label
from longitude.extension.measure import Evaluator
from longitude.extension.plan import Method
from longitude.extension.search.halving import (
    SMALLEST,
    Losses,
    Score,
    SearchResult,
    cost,
    evolve,
    judge,
    split_documents,
)
from longitude.extension.search.space import (
    STARTS,
    factor_starts,
    neighbours,
    scalable,
    search_factors,
    starts,
)
from longitude.hf.patch import own_scheme
from longitude.parts import Rope

KIND = "search"  # of its rows: no table is made of them
LEADERS = 2  # methods whose parameters are searched
LOSSES_PER_BRANCH = 48  # of schemes on documents; more where more documents need them
GENERATIONS = 3


class UseOfContext:
    """Scores schemes by whether they use the context, on the evaluator's documents: recorded."""

    def __init__(self, evaluator: Evaluator, store: Store) -> None:
        self.evaluator, self.store = evaluator, store
        self.own = own_scheme(evaluator.target.model)
        self.protocol = replace(evaluator.plan.protocol, prompts=1, stretches=1)
        documents = evaluator.session.documents
        self.about = {"texts": " ".join(document.text.digest for document in documents)}

    def __call__(self, text: str, chosen: Sequence[int]) -> list[float]:
        return [self.loss(text, index) for index in chosen]

    def loss(self, text: str, index: int) -> float:
        """The answers' loss, if questions are asked, less the gain of a key token, in nats per
        token, on one document."""
        answers = self.rows(text, metrics()[ANSWER_LOSS], index)
        (kept,) = self.rows(text, metrics()[KEPT], index)
        if any(row["refused"] for row in (kept, *answers)):
            return math.inf
        gain = sum(gain for gain, _ in kept["gains"]) / kept["keys"]
        return (fmean(row["loss"] for row in answers) if answers else 0.0) - gain

    def rows(self, text: str, metric: Metric, index: int) -> list[dict[str, Any]]:
        """A metric's rows of one document, measured once."""
        plan, settings = self.evaluator.plan, {**metric.settings(self.protocol), **self.about}
        keys = [
            ResultKey(
                metric.rows,
                plan.subject,
                text,
                plan.target,
                at={**at, "round": index},
                protocol=settings,
                seed=plan.seed,
            )
            for at in metric.grid(self.protocol)
        ]
        stored = [{**key.to_json(), "kind": KIND} for key in keys]
        known = [value for key in stored if (value := self.store.get(key)) is not None]
        if len(known) == len(keys):
            return known
        values = self.evaluator.values(self.method(text), keys)
        for key, value in zip(stored, values, strict=True):
            self.store.put(key, value)
        return values

    def method(self, text: str) -> Method:
        try:
            scheme = parse(text)
        except UserError as error:  # the search's fault, not the user's
            raise ValueError(f"the search wrote {text!r}: {error}") from error
        return Method(label(scheme, self.own), text, text, by_length(scheme))


def search_parameters(
    evaluator: Evaluator, leaders: Sequence[str], store: Store, progress: Progress = silent
) -> list[dict[str, Any]]:
    """Search around the leading schemes on the evaluator's documents; what recommendation.json
    says of it."""
    subject, target = evaluator.plan.subject, evaluator.plan.target
    config = evaluator.target.model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None)
    score, documents = UseOfContext(evaluator, store), len(evaluator.session.documents)
    roots = [scheme for scheme in leaders[:LEADERS] if scheme != subject.scheme]
    branches = len(roots) + 1
    found = search(
        score,
        roots,
        subject.trained,
        target,
        head_dim or config.hidden_size // config.num_attention_heads,
        documents,
        max(branches * LOSSES_PER_BRANCH, smallest_budget(branches, documents)),
        evaluator.plan.seed,
        progress,
        own=subject.scheme,
    )
    labels = {text: score.method(text).label for one in found for text in (one.start, one.winner)}
    return [
        {
            "label": labels[one.scheme],
            "scheme": one.scheme,
            "start": one.start,
            "better": one.better,
            "gain": one.gain and asdict(one.gain),
            "tried": one.tried,
            "sentence": _sentence(one, labels[one.start], labels[one.winner]),
        }
        for one in found
    ]


def _sentence(found: SearchResult, start: str, winner: str) -> str:
    if found.gain is None:
        gone, stays = (start, winner) if found.better else (winner, start)
        return f"{gone} was refused on the documents to judge on: use {stays}."
    gain = (
        f"{found.gain.mean:+.4f} nats per token (95 % CI {found.gain.low:+.4f} to "
        f"{found.gain.high:+.4f}) on {len(found.judged_documents)} documents that the search never "
        f"saw, of {found.tried} schemes tried"
    )
    if found.better:
        return f"{winner} instead of {start} gains {gain}."
    return f"no better than {start} was found: the nearest gains {gain}."


def search(
    score: Score,
    leaders: Sequence[str],
    trained: int,
    target: int,
    head_dim: int,
    documents: int,
    budget: int,
    seed: int = 0,
    progress: Progress = silent,
    *,
    own: str | None = None,
) -> list[SearchResult]:
    """One result for each leader that can vary, and one for per-dimension factors where the model's
    own scheme is given and is one rotation. The budget counts losses (a scheme on a document) of
    the search, shared evenly; judging adds at most two for each judged document and result."""
    scheme = None if own is None else parse(own)
    rope = scheme.rotary if isinstance(scheme, Scheme) else None
    rope = rope if rope and scalable(rope, head_dim, trained) else None
    roots = starts(leaders, trained, target)
    searched, judged = split_documents(documents, seed)
    branches = len(roots) + (rope is not None)
    if budget < smallest_budget(branches, documents):
        raise UserError(
            f"--search has {branches} schemes to vary and needs "
            f"{smallest_budget(branches, documents)} losses for them, but may take {budget}: allow "
            f"more, or give fewer methods or documents."
        )
    share = budget // max(1, branches)
    branch = _Branch(score, trained, target, searched, judged, share, seed, progress)
    found = [branch.parameters(root) for root in roots]
    return [*found, branch.factors(rope, head_dim)] if rope else found


def smallest_budget(branches: int, documents: int) -> int:
    """The fewest losses with which so many schemes can be varied."""
    searched = documents // 2
    return branches * (STARTS * searched + cost(SMALLEST, searched))


@dataclass(frozen=True)
class _Branch:
    """What the branches of one search have in common."""

    score: Score
    trained: int
    target: int
    searched: tuple[int, ...]
    judged: tuple[int, ...]
    share: int
    seed: int
    progress: Progress

    def parameters(self, root: str) -> SearchResult:
        """Better parameters for one scheme."""
        losses, rng = Losses(self.score), Random(f"{self.seed} {root}")

        def breed(parents: Sequence[str], count: int, generation: int) -> list[str]:
            each = -(-count // len(parents))
            bred = [neighbours(p, self.trained, self.target, rng, each) for p in parents]
            return [child for litter in bred for child in litter][:count]

        winner = evolve(
            losses, [root], breed, self.searched, self.share, GENERATIONS, rng, self._report(root)
        )
        return self._judged(losses, root, winner)

    def factors(self, rope: Rope, head_dim: int) -> SearchResult:
        """Factors for each dimension, against the best of linear, NTK and YaRN."""
        losses, rng = Losses(self.score), Random(f"{self.seed} factors")
        lengths = self.trained, self.target
        report = self._report("factors")
        winner = search_factors(
            losses, rope, head_dim, *lengths, self.searched, self.share, rng, report
        )
        names = factor_starts(rope, head_dim, *lengths)
        root = min(names, key=lambda text: losses.mean(text, self.searched))
        return self._judged(losses, names[root], names.get(winner, winner))

    def _judged(self, losses: Losses, start: str, winner: str) -> SearchResult:
        return judge(self.score, start, winner, losses.tried, self.searched, self.judged)

    def _report(self, root: str) -> Callable[[int, int, str], None]:
        def report(done: int, total: int, stage: str) -> None:
            self.progress(Event(f"{root}: {stage}", done - 1, total, job="search"))

        return report
