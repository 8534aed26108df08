"""Search after a comparison: better parameters for each leading scheme, factors per dimension.

Schemes are strings and documents are indices. A loss comes from `score`, which records it, so that
a killed search reads the recorded losses when it is run again: the same seed requests the same
losses in the same order. The score measures use of the context at the target, as LongRoPE2's
needle-driven perplexity does (Shang et al. 2025, arXiv:2502.20082): the loss of the answers to
questions about the text, minus the gain from evidence at that distance (the stretch test), both in
nats per token.

Successive halving: many schemes are scored on one document, the better half on twice as many.
Jamieson & Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (arXiv:1502.07943); the inner loop of Hyperband (Li et al. 2018, arXiv:1603.06560).
Each round compares means over the same documents, so what a document adds to every loss cancels.
Budgets count losses of one scheme on one document, and none is computed twice. `evolve` repeats
the halving on the children of its survivors, each time with the documents in another order.

A search selects what happens to suit its documents, so its own losses flatter it. It uses other
documents than the comparison. Half of them, drawn by the seed, are for searching; on the other
half, which no step of the search ever sees, `judge` compares the winner with its start, document by
document. Only a gain whose 95 % interval lies above zero counts: otherwise the start is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Any

from longitude.core.progress import Event, Progress, silent
from longitude.core.scheme import Scheme
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import ANSWER_LOSS, KEPT, RETRIEVAL, ResultKey
from longitude.eval.stats import Interval, paired
from longitude.eval.tasks import Metric, metrics
from longitude.extension import search_space as space
from longitude.extension.candidates import by_length, label
from longitude.extension.measure import Clock, Evaluator, OutOfTime, measurements
from longitude.extension.plan import Method
from longitude.hf.patch import own_scheme
from longitude.parts import Rope

Score = Callable[[str, Sequence[int]], Sequence[float]]  # scheme, documents -> a loss for each
Report = Callable[[int, int, str], None]  # round, number of rounds, what is scored
Breed = Callable[[Sequence[str], int, int], list[str]]  # parents, count, generation -> children
SURVIVORS = 2  # schemes that are scored on all documents, at least
SMALLEST = 4  # schemes that a halving starts with, at least
WORTHWHILE = 6  # schemes in a generation; a small budget means fewer generations instead
MIN_DOCUMENTS = 4  # two to search on, two to judge on
KIND = "search"  # kind of the rows: they enter no table
LEADERS = 2  # methods whose parameters are searched
LOSSES_PER_BRANCH = 48  # of one scheme on one document; more if more documents need them
GENERATIONS, FACTOR_GENERATIONS = 3, 4
CRITICAL = 0.5  # the share of children in LongRoPE2's form


def ignore(done: int, total: int, stage: str) -> None:
    """Report nothing."""


class Losses:
    """All losses so far, each scored once; a scheme refused on one document is refused on all."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._known: dict[str, dict[int, float]] = {}

    @property
    def spent(self) -> int:
        return sum(map(len, self._known.values()))

    @property
    def tried(self) -> int:
        return len(self._known)

    def of(self, scheme: str, documents: Sequence[int]) -> list[float]:
        """One loss per document, infinite if refused; scores those that are missing."""
        known = self._known.setdefault(scheme, {})
        missing = [document for document in documents if document not in known]
        if math.inf in known.values() or not missing:
            return [known.get(document, math.inf) for document in documents]
        new = [math.inf if math.isnan(loss) else loss for loss in self._score(scheme, missing)]
        known.update(zip(missing, new, strict=True))
        return [known[document] for document in documents]

    def complete(self, scheme: str, documents: Sequence[int]) -> bool:
        """Whether nothing is left to score."""
        known = self._known.get(scheme, {})
        return math.inf in known.values() or known.keys() >= set(documents)

    def mean(self, scheme: str, documents: Sequence[int]) -> float:
        return math.fsum(self.of(scheme, documents)) / len(documents)


def schedule(schemes: int, documents: int) -> list[tuple[int, int]]:
    """The rounds of a halving, as (number of schemes, number of documents they are scored on)."""
    rounds, scored = [(schemes, 1)], 1
    while scored < documents:
        scored = min(2 * scored, documents)
        rounds.append((min(schemes, max(SURVIVORS, rounds[-1][0] // 2)), scored))
    return rounds


def cost(schemes: int, documents: int, known: int = 0) -> int:
    """An upper bound on the losses that a halving computes. Each round adds documents to those of
    the one before, and `known` schemes need no losses."""
    added = pairwise([(0, 0), *schedule(schemes, documents)])
    new = schemes - known
    return sum(min(left, new) * (scored - before) for (_, before), (left, scored) in added)


def affordable(budget: int, documents: int, known: int = 0) -> int:
    """The most schemes that a halving can start with, including those that are fully known."""
    schemes = known
    while cost(schemes + 1, documents, known) <= budget:
        schemes += 1
    return schemes


def halve(
    losses: Losses, schemes: Sequence[str], documents: Sequence[int], report: Report = ignore
) -> list[str]:
    """Halve; return the schemes scored on all documents, best first (ties in the given order)."""
    left, rounds = list(dict.fromkeys(schemes)), schedule(len(set(schemes)), len(documents))
    for index, (keep, scored) in enumerate(rounds):
        left = left[:keep]
        schemes_left = f"{len(left)} scheme{'s' * (len(left) != 1)}"
        stage = f"{schemes_left} on {scored} document{'s' * (scored != 1)}"
        report(index + 1, len(rounds), stage)
        left.sort(key=lambda scheme: losses.mean(scheme, documents[:scored]))
    return left


def evolve(
    losses: Losses,
    roots: Sequence[str],
    breed: Breed,
    documents: Sequence[int],
    budget: int,
    generations: int,
    rng: Random,
    report: Report = ignore,
) -> str:
    """Return the best scheme bred from these roots within a budget of losses on these documents."""
    limit, pool, order = losses.spent + budget, list(roots), list(documents)
    generations = max(1, min(generations, budget // cost(WORTHWHILE, len(order))))
    for generation in range(generations):
        share = (limit - losses.spent) // (generations - generation)
        known = sum(losses.complete(scheme, order) for scheme in pool)
        children = breed(pool, max(0, affordable(share, len(order), known) - len(pool)), generation)
        rng.shuffle(order)
        pool = halve(losses, [*pool, *children], order, report)[:SURVIVORS]
    return pool[0]


@dataclass(frozen=True)
class SearchResult:
    """`scheme` is the one to use: the winner, or the start if the gain is not significant. `gain`
    is the start's loss minus the winner's on the judged documents; None if one of the two was
    refused there. `tried` counts schemes, including the start."""

    scheme: str
    start: str
    winner: str
    gain: Interval | None
    tried: int
    search_documents: tuple[int, ...]
    judged_documents: tuple[int, ...]

    @property
    def better(self) -> bool:
        """Whether the winner replaces the start."""
        return self.scheme != self.start


def split_documents(documents: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the documents to search on and those to judge on."""
    if documents < MIN_DOCUMENTS:
        raise UserError(
            f"--search needs {MIN_DOCUMENTS} documents beside those that methods are compared on, "
            f"but got {documents}: give more with --text, or a --docs of 2 or more."
        )
    shuffled = Random(f"{seed} documents").sample(range(documents), documents)
    return tuple(shuffled[: documents // 2]), tuple(shuffled[documents // 2 :])


def judge(
    score: Score,
    start: str,
    winner: str,
    tried: int,
    searched: Sequence[int],
    judged: Sequence[int],
) -> SearchResult:
    """Compare the winner with its start on held-out documents."""
    losses = Losses(score)
    before, after = losses.of(start, judged), losses.of(winner, judged)
    gain = None if math.inf in (*before, *after) else paired(before, after)
    helps = math.inf not in after if gain is None else gain.clear and gain.mean > 0
    scheme = winner if helps else start
    return SearchResult(scheme, start, winner, gain, tried, tuple(searched), tuple(judged))


def search_factors(
    score: Score | Losses,
    rope: Rope,
    head_dim: int,
    trained: int,
    target: int,
    documents: Sequence[int],
    budget: int,
    rng: Random,
    report: Report = ignore,
) -> str:
    """The best scheme of per-dimension factors for the model's own rotation. On these documents it
    is never worse than its starts, which are scored on all of them."""
    losses = score if isinstance(score, Losses) else Losses(score)
    roots = list(space.factor_starts(rope, head_dim, trained, target))
    spent_before = losses.spent
    roots.sort(key=lambda root: losses.mean(root, documents))
    budget -= losses.spent - spent_before
    own, ratio = space.own_curve(rope, head_dim, trained), target / trained
    limit, ends = math.log(2 * ratio) + max(own.logs), space.critical_pairs(rope, head_dim, trained)

    def breed(parents: Sequence[str], count: int, generation: int) -> list[str]:
        step = math.log(target / trained) / 4 / 2**generation
        curves = [space.curve_of(parent) for parent in parents]
        children = [space.child(curves, step, limit, rng) for _ in range(count)]
        for n, curve in enumerate(children):
            if rng.random() < CRITICAL:
                children[n] = space.around_critical(curve, own, rng.randint(*ends), ratio)
        return [space.written(rope, curve, trained, target) for curve in children]

    return evolve(losses, roots, breed, documents, budget, FACTOR_GENERATIONS, rng, report)


class UseOfContext:
    """Scores schemes by their use of the context on the evaluator's documents; records the rows."""

    def __init__(self, evaluator: Evaluator, store: Store) -> None:
        self.evaluator, self.store = evaluator, store
        self.own = own_scheme(evaluator.target.model)
        self.protocol = replace(evaluator.plan.protocol, prompts=1, stretches=1)
        documents = evaluator.session.documents
        self.about = {"texts": " ".join(document.text.digest for document in documents)}

    def __call__(self, text: str, chosen: Sequence[int]) -> list[float]:
        return [self.loss(text, index) for index in chosen]

    def loss(self, text: str, index: int) -> float:
        """The answers' loss on one document (0 without questions) minus the gain per key token from
        evidence, in nats per token."""
        answers = self.rows(text, metrics()[ANSWER_LOSS], index)
        (kept,) = self.rows(text, metrics()[KEPT], index)
        if any(row["refused"] for row in (kept, *answers)):
            return math.inf
        gain = sum(gain for gain, _ in kept["gains"]) / kept["keys"]
        return (fmean(row["loss"] for row in answers) if answers else 0.0) - gain

    def seconds(self) -> float:
        """The time of one loss, estimated from the rows of the comparison."""
        plan, total = self.evaluator.plan, 0.0
        rows = [row for row in measurements(plan, self.store) if row.key.length == plan.target]
        for measure, documents in (
            (KEPT, plan.protocol.stretches),
            (RETRIEVAL, plan.protocol.prompts),
        ):
            own = [row for row in rows if row.key.measure == measure and row.refused is None]
            runs = len({(row.key.scheme, row.key.at["round"]) for row in own})
            total += sum(row.value["seconds"] for row in own) / (documents * max(1, runs))
        return total

    def rows(self, text: str, metric: Metric, index: int) -> list[dict[str, Any]]:
        """A metric's rows on one document, measured once and recorded."""
        plan, settings = self.evaluator.plan, {**metric.settings(self.protocol), **self.about}
        common = (metric.rows, plan.subject, text, plan.target, None)
        keys = [
            ResultKey(*common, {**at, "round": index}, settings, plan.seed)
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
    evaluator: Evaluator,
    leaders: Sequence[str],
    store: Store,
    progress: Progress = silent,
    clock: Clock | None = None,
) -> list[dict[str, Any]]:
    """Search around the leading schemes on the evaluator's documents; return the entries of
    recommendation.json. If time is short, compute fewer losses, then vary fewer schemes."""
    plan, subject = evaluator.plan, evaluator.plan.subject
    config = evaluator.target.model.config.get_text_config()
    score, documents = UseOfContext(evaluator, store), len(evaluator.session.documents)
    roots = [scheme for scheme in leaders[:LEADERS] if scheme != subject.scheme]
    branches, own = len(roots) + 1, subject.scheme
    losses = max(branches * LOSSES_PER_BRANCH, smallest_budget(branches, documents))
    if clock is not None:
        time_left, judging = clock.deadline - time.monotonic(), documents - documents // 2
        room = int(time_left / (score.seconds() or math.inf))
        while branches and smallest_budget(branches, documents) + 2 * judging * branches > room:
            branches -= 1
        if not branches:
            return []
        roots, own = roots[:branches], own if branches > len(roots) else None
        losses = min(losses, room - 2 * judging * branches)
    with clock.limit() if clock else nullcontext():
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        settings = (subject.trained, plan.target, size, documents, losses, plan.seed, progress)
        results = search(score, roots, *settings, own=own)
    labels = {text: score.method(text).label for r in results for text in (r.start, r.winner)}
    return [
        {
            "label": labels[r.scheme],
            "scheme": r.scheme,
            "start": r.start,
            "better": r.better,
            "gain": r.gain and asdict(r.gain),
            "tried": r.tried,
            "sentence": _sentence(r, labels[r.start], labels[r.winner]),
        }
        for r in results
    ]


def _sentence(found: SearchResult, start: str, winner: str) -> str:
    if found.gain is None:
        gone, stays = (start, winner) if found.better else (winner, start)
        return f"{gone} failed on the held-out documents: use {stays}."
    gain = (
        f"{found.gain.mean:+.4f} nats per token (95 % CI {found.gain.low:+.4f} to "
        f"{found.gain.high:+.4f}) on {len(found.judged_documents)} documents that the search never "
        f"saw, of {found.tried} schemes tried"
    )
    if found.better:
        return f"{winner} instead of {start} gains {gain}."
    return f"no better than {start} was found: the best candidate gains {gain}."


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
    """Return one result per leader that can vary, and one for per-dimension factors if the model's
    own scheme is given and is a single rotation. The budget counts losses (a scheme on a document)
    of the search, shared evenly; judging adds at most two per judged document and result. If a time
    budget ends the search, return the results so far."""
    scheme = None if own is None else parse(own)
    rope = scheme.rotary if isinstance(scheme, Scheme) else None
    rope = rope if rope and space.scalable(rope, head_dim, trained) else None
    roots = space.starts(leaders, trained, target)
    searched, judged = split_documents(documents, seed)
    branches = len(roots) + (rope is not None)
    if budget < (least := smallest_budget(branches, documents)):
        raise UserError(
            f"--search has {branches} schemes to vary and needs {least} losses for them, but may "
            f"take {budget}: allow more, or give fewer methods or documents."
        )
    share = budget // max(1, branches)
    branch = _Branch(score, trained, target, searched, judged, share, seed, progress)
    results = []
    with suppress(OutOfTime):
        for root in roots:
            results.append(branch.parameters(root))
        if rope:
            results.append(branch.factors(rope, head_dim))
    return results


def smallest_budget(branches: int, documents: int) -> int:
    """The fewest losses that suffice to vary this many schemes."""
    searched = documents // 2
    return branches * (space.STARTS * searched + cost(SMALLEST, searched))


@dataclass(frozen=True)
class _Branch:
    """The settings that all branches of one search share."""

    score: Score
    trained: int
    target: int
    searched: tuple[int, ...]
    judged: tuple[int, ...]
    share: int
    seed: int
    progress: Progress

    def parameters(self, root: str) -> SearchResult:
        losses, rng = Losses(self.score), Random(f"{self.seed} {root}")

        def breed(parents: Sequence[str], count: int, generation: int) -> list[str]:
            quota = -(-count // len(parents))
            bred = [space.neighbours(p, self.trained, self.target, rng, quota) for p in parents]
            return [child for siblings in bred for child in siblings][:count]

        report = self._report(root)
        docs, budget = self.searched, self.share
        winner = evolve(losses, [root], breed, docs, budget, GENERATIONS, rng, report)
        return self._judged(losses, root, winner)

    def factors(self, rope: Rope, head_dim: int) -> SearchResult:
        """Factors per dimension, compared with the best of linear, NTK, YaRN and LongRoPE2."""
        losses, rng = Losses(self.score), Random(f"{self.seed} factors")
        model, report = (rope, head_dim, self.trained, self.target), self._report("factors")
        winner = search_factors(losses, *model, self.searched, self.share, rng, report)
        names = space.factor_starts(*model)
        root = min(names, key=lambda text: losses.mean(text, self.searched))
        return self._judged(losses, names[root], names.get(winner, winner))

    def _judged(self, losses: Losses, start: str, winner: str) -> SearchResult:
        return judge(self.score, start, winner, losses.tried, self.searched, self.judged)

    def _report(self, root: str) -> Report:
        return lambda done, total, stage: self.progress(
            Event(f"{root}: {stage}", done - 1, total, job="search")
        )
