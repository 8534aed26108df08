"""The search after a comparison: better parameters for each leading scheme, factors per dimension.

Schemes are texts and documents are numbers: a loss comes from `score`, which records what it
measured and reads the record when a killed search is run again. The same seed asks for the same
losses in the same order. What is scored at the target is whether the context is used, as
LongRoPE2's needle-driven perplexity does (Shang et al. 2025, arXiv:2502.20082): the loss of the
answers to questions about the text, less what evidence gains at that distance (the stretch test),
both in nats per token.

Successive halving: many schemes are scored on one document, the better half on twice as many.
Jamieson & Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (arXiv:1502.07943); the inner loop of Hyperband (Li et al. 2018, arXiv:1603.06560).
Each round compares means over the same documents, so what a document adds to every loss cancels.
Budgets count losses of one scheme on one document, and none is computed twice. `evolve` repeats
the halving on what is bred from its survivors, each time with the documents in another order.

A search picks what happened to suit its documents, so its own losses flatter it. Its documents are
others than those of the comparison. Half of them, drawn by the seed, are for searching; on the
other half, which no step of the search ever sees, `judge` compares the winner with its start,
document by document. Only a gain whose 95 % interval lies above zero counts: otherwise the start
is kept.
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

Score = Callable[[str, Sequence[int]], Sequence[float]]  # a scheme, documents -> a loss for each
Report = Callable[[int, int, str], None]  # this round, of how many, what it scores
Breed = Callable[[Sequence[str], int, int], list[str]]  # parents, how many, generation -> children
SURVIVORS = 2  # schemes that are scored on all documents, at least
SMALLEST = 4  # schemes that a halving starts with, at least
WORTHWHILE = 6  # schemes of a generation; a small budget has fewer generations instead
MIN_DOCUMENTS = 4  # two to search on, two to judge on
KIND = "search"  # of its rows: no table is made of them
LEADERS = 2  # methods whose parameters are searched
LOSSES_PER_BRANCH = 48  # of schemes on documents; more where more documents need them
GENERATIONS, FACTOR_GENERATIONS = 3, 4
CRITICAL = 0.5  # the share of children in LongRoPE2's form


def ignore(done: int, total: int, stage: str) -> None:
    """Report nothing."""


class Losses:
    """Every loss known so far, scored once; a scheme refused on one document is refused."""

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
        """One for each document; infinite where refused."""
        known = self._known.setdefault(scheme, {})
        missing = [one for one in documents if one not in known]
        if math.inf in known.values() or not missing:
            return [known.get(one, math.inf) for one in documents]
        new = [math.inf if math.isnan(loss) else loss for loss in self._score(scheme, missing)]
        known.update(zip(missing, new, strict=True))
        return [known[one] for one in documents]

    def complete(self, scheme: str, documents: Sequence[int]) -> bool:
        """Whether nothing is left to score."""
        known = self._known.get(scheme, {})
        return math.inf in known.values() or known.keys() >= set(documents)

    def mean(self, scheme: str, documents: Sequence[int]) -> float:
        return math.fsum(self.of(scheme, documents)) / len(documents)


def schedule(schemes: int, documents: int) -> list[tuple[int, int]]:
    """Rounds, as how many schemes are scored on how many documents."""
    rounds, scored = [(schemes, 1)], 1
    while scored < documents:
        scored = min(2 * scored, documents)
        rounds.append((min(schemes, max(SURVIVORS, rounds[-1][0] // 2)), scored))
    return rounds


def cost(schemes: int, documents: int, known: int = 0) -> int:
    """The losses of a halving, at most: later rounds add to the documents of earlier ones, and of
    some schemes everything is known."""
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
    """The schemes that were scored on all documents, best first; of equals the one named first."""
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
    """The best scheme bred from these roots within so many losses, on all these documents."""
    limit, pool, order = losses.spent + budget, list(roots), list(documents)
    generations = max(1, min(generations, budget // cost(WORTHWHILE, len(order))))
    for generation in range(generations):
        share = (limit - losses.spent) // (generations - generation)
        known = sum(losses.complete(scheme, order) for scheme in pool)
        born = breed(pool, max(0, affordable(share, len(order), known) - len(pool)), generation)
        rng.shuffle(order)
        pool = halve(losses, [*pool, *born], order, report)[:SURVIVORS]
    return pool[0]


@dataclass(frozen=True)
class SearchResult:
    """`scheme` is the one to use: the winner, or the start where the gain is not significant.
    `gain` is the start's loss minus the winner's, on judged documents; None where one of them was
    refused there. `tried` counts schemes, the start included."""

    scheme: str
    start: str
    winner: str
    gain: Interval | None
    tried: int
    search_documents: tuple[int, ...]
    judged_documents: tuple[int, ...]

    @property
    def better(self) -> bool:
        """Whether the search led anywhere."""
        return self.scheme != self.start


def split_documents(documents: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The documents to search on and those to judge on."""
    if documents < MIN_DOCUMENTS:
        raise UserError(
            f"--search needs {MIN_DOCUMENTS} documents beside those that methods are compared on, "
            f"but got {documents}: give more with --text, or a --docs of 2 or more."
        )
    drawn = Random(f"{seed} documents").sample(range(documents), documents)
    return tuple(drawn[: documents // 2]), tuple(drawn[documents // 2 :])


def judge(
    score: Score,
    start: str,
    winner: str,
    tried: int,
    searched: Sequence[int],
    judged: Sequence[int],
) -> SearchResult:
    """The winner against its start, on held-out documents."""
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
    """The best scheme of per-dimension factors for the model's own rotation: never worse
    than its starts on these documents, on all of which the starts are scored."""
    losses = score if isinstance(score, Losses) else Losses(score)
    roots = list(space.factor_starts(rope, head_dim, trained, target))
    spent = losses.spent
    roots.sort(key=lambda root: losses.mean(root, documents))
    budget -= losses.spent - spent
    own, ratio = space.own_curve(rope, head_dim, trained), target / trained
    most, ends = math.log(2 * ratio) + max(own.logs), space.critical_pairs(rope, head_dim, trained)

    def breed(parents: Sequence[str], count: int, generation: int) -> list[str]:
        step = math.log(target / trained) / 4 / 2**generation
        curves = [space.curve_of(parent) for parent in parents]
        drawn = [space.child(curves, step, most, rng) for _ in range(count)]
        for n, curve in enumerate(drawn):
            if rng.random() < CRITICAL:
                drawn[n] = space.around_critical(curve, own, rng.randint(*ends), ratio)
        return [space.written(rope, curve, trained, target) for curve in drawn]

    return evolve(losses, roots, breed, documents, budget, FACTOR_GENERATIONS, rng, report)


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

    def seconds(self) -> float:
        """Of one loss, as the rows of the comparison took them."""
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
        """A metric's rows of one document, measured once."""
        plan, settings = self.evaluator.plan, {**metric.settings(self.protocol), **self.about}
        about = (metric.rows, plan.subject, text, plan.target, None)
        keys = [
            ResultKey(*about, {**at, "round": index}, settings, plan.seed)
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
    """Search around the leading schemes on the evaluator's documents; what recommendation.json
    says of it. In a short time fewer losses are taken, then fewer schemes varied."""
    plan, subject = evaluator.plan, evaluator.plan.subject
    config = evaluator.target.model.config.get_text_config()
    score, documents = UseOfContext(evaluator, store), len(evaluator.session.documents)
    roots = [scheme for scheme in leaders[:LEADERS] if scheme != subject.scheme]
    branches, own = len(roots) + 1, subject.scheme
    losses = max(branches * LOSSES_PER_BRANCH, smallest_budget(branches, documents))
    if clock is not None:
        left, judging = clock.deadline - time.monotonic(), documents - documents // 2
        room = int(left / (score.seconds() or math.inf))
        while branches and smallest_budget(branches, documents) + 2 * judging * branches > room:
            branches -= 1
        if not branches:
            return []
        roots, own = roots[:branches], own if branches > len(roots) else None
        losses = min(losses, room - 2 * judging * branches)
    with clock.limit() if clock else nullcontext():
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        about = (subject.trained, plan.target, size, documents, losses, plan.seed, progress)
        found = search(score, roots, *about, own=own)
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
    the search, shared evenly; judging adds at most two for each judged document and result. Where a
    time budget ends it, those found until then."""
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
    found = []
    with suppress(OutOfTime):
        for root in roots:
            found.append(branch.parameters(root))
        if rope:
            found.append(branch.factors(rope, head_dim))
    return found


def smallest_budget(branches: int, documents: int) -> int:
    """The fewest losses with which so many schemes can be varied."""
    searched = documents // 2
    return branches * (space.STARTS * searched + cost(SMALLEST, searched))


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
        losses, rng = Losses(self.score), Random(f"{self.seed} {root}")

        def breed(parents: Sequence[str], count: int, generation: int) -> list[str]:
            each = -(-count // len(parents))
            bred = [space.neighbours(p, self.trained, self.target, rng, each) for p in parents]
            return [child for litter in bred for child in litter][:count]

        report = self._report(root)
        docs, budget = self.searched, self.share
        winner = evolve(losses, [root], breed, docs, budget, GENERATIONS, rng, report)
        return self._judged(losses, root, winner)

    def factors(self, rope: Rope, head_dim: int) -> SearchResult:
        """Factors for each dimension, against the best of linear, NTK and YaRN."""
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
