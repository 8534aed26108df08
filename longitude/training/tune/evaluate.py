"""What fine-tuning changed: `extend`'s measurements before and after it, on held-out text.

Three methods are measured on the same documents and questions: the baseline, the base model under
the new scheme (before), and the trained model (after). Rows are stored under a digest of the
weights that they were measured on, so nothing is measured twice.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.documents import Document, cut
from longitude.eval.records import BASELINE, KEPT, Measurement
from longitude.eval.tasks import EvalProtocol, metrics
from longitude.hf.loading import load, without_weights
from longitude.training.data import gather
from longitude.training.distributed import World
from longitude.training.loop import Stopped
from longitude.training.tune.recipes import OWN
from longitude.training.tune.run import Tuned, TuneOptions

if TYPE_CHECKING:
    from longitude.extension.plan import Method
    from longitude.extension.rank import Ranking
    from longitude.extension.result import ExtendResult

BEFORE, AFTER = "before", "after"
REPORT = "report"  # the folder of a run's measurements
HELPED = "helped"


class HeldOut(NamedTuple):
    """The lengths and documents that fine-tuning is measured on, and the base model's window and
    tokenizer."""

    trained: int
    lengths: tuple[int, ...]
    documents: list[Document]
    tokenizer: Any


def make_test_set(model: str, to: str, options: TuneOptions) -> HeldOut:
    """Build the test set; every error in the options is raised here, before weights are read."""
    from longitude.extension.plan import lengths_for

    if options.docs < 1:
        raise UserError(f"--docs must be at least 1, but got {options.docs}.")
    EvalProtocol(1, options.tasks, 1 if options.questions is None else options.questions)
    trained, tokenizer = without_weights(
        model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    if trained is None or tokenizer is None:
        missing = "tokenizer" if trained is not None else "trained length in its config.json"
        raise UserError(f"{model} has no {missing}, and texts must be cut: add it.")
    lengths = lengths_for(model, trained, to, options.lengths)
    corpus = gather(options.test or options.text)
    # texts given by --test are used in full
    held_out = [*corpus.train, *corpus.test] if options.test else [*corpus.test]
    texts = [(f"{corpus.name}, part {n + 1}", text.decode()) for n, text in enumerate(held_out)]
    try:
        documents = cut(texts, tokenizer, lengths[-1], options.docs, options.seed)
    except UserError as error:
        source = "--test" if options.test else "what is held out of training to measure on"
        raise UserError(
            f"{source} is too short ({str(error).partition(':')[0]}): give more with --text or "
            f"--test, or skip the measurements with --no-measure."
        ) from error
    return HeldOut(trained, lengths, documents, tokenizer)


def evaluate(
    test_set: HeldOut, tuned: Tuned, options: TuneOptions, world: World
) -> ExtendResult | None:
    """Measure the rows of baseline, before and after that the store lacks, and write the report.
    Processes that shared each training sequence also share each text; the first has the result."""
    from longitude.extension.api import writable
    from longitude.extension.candidates import by_length
    from longitude.extension.plan import Method
    from longitude.extension.ranks import IDLE
    from longitude.extension.result import STORE, ExtendResult

    after = Method(AFTER, tuned.scheme, None, by_length(parse(tuned.scheme)))
    before = replace(after, label=BEFORE, patch=tuned.scheme)
    # if the window is too short for so many, the first process measures alone
    ranks = tuned.ranks if test_set.lengths[0] >= 4 * tuned.ranks else 1
    group, result = world.shared_by(ranks).group, None
    # `new_group` is collective; processes that don't measure wait longer than training's timeout
    all_ranks: Any = dist.new_group(backend="gloo", timeout=IDLE) if world.size > 1 else None
    models = (tuned.base, options.revision, before), (tuned.folder, None, after)
    if 0 < world.rank < ranks:
        for m in models:
            _measure(test_set, *m, options, world.device, None, group)
    elif world.first:
        folder = writable(Path(tuned.out) / REPORT)
        with Store(folder / STORE) as store:
            try:
                base, trained = (
                    _measure(test_set, *m, options, world.device, store, group) for m in models
                )
            except KeyboardInterrupt:
                raise Stopped(
                    f"{tuned.folder} is complete; the same command continues its measurements."
                ) from None
            # as rows of the base model, under a name that no scheme has
            subject, scheme = base[0].key.subject, f"{tuned.scheme} after {tuned.steps:,} steps"
            keys = [replace(row.key, subject=subject, scheme=scheme) for row in trained]
            rows = [*base, *(replace(r, key=k) for r, k in zip(trained, keys, strict=True))]
            result = ExtendResult(rows, summarise(rows, tuned), next_steps(tuned))
            result.write(folder, store)
    if all_ranks is not None:
        dist.barrier(group=all_ranks)
    return result


def _measure(
    test_set: HeldOut, name: str, revision: str | None, method: Method, options: TuneOptions,
    device: torch.device, store: Store | None, group: Any,
) -> list[Measurement]:  # fmt: skip
    """Measure one model, and free it before the next one is loaded. The base model is measured as
    the baseline first, and then under the scheme if that differs."""
    from longitude.extension.plan import Method, Plan, TargetModel, protocol_for
    from longitude.extension.ranks import measure

    loading: dict[str, Any] = {**options.loading, "revision": revision}
    if group is not None:
        loading["device"] = str(device)
    model, tokenizer = load(name, quiet=True, **loading)
    # a checkpoint without a tokenizer uses its base's
    target = TargetModel.of(model, tokenizer or test_set.tokenizer, name, revision)
    protocol = protocol_for(  # the same for all methods, by the base's window
        test_set.lengths[0], options.tasks, options.questions, False
    )
    methods, scheme = [method], target.subject.scheme
    if method.label == BEFORE:
        methods = [Method(BASELINE, scheme, None), *([method] if method.scheme != scheme else [])]
    lengths, documents = test_set.lengths, test_set.documents
    texts = tuple(document.text for document in documents)
    subject = replace(target.subject, trained=test_set.trained)  # of the base, for before and after
    plan = Plan(subject, tuple(methods), lengths, texts, protocol, options.seed)
    rows = measure(plan, target, documents, store, options.progress, group)
    del model, target
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def summarise(rows: Sequence[Measurement], tuned: Tuned) -> dict[str, Any]:
    """Summarise what training changed, in the format of recommendation.json."""
    from longitude.extension.advice import describe
    from longitude.extension.rank import Ranking

    ranking = Ranking(rows, tuned.target)
    start = str(BEFORE if BEFORE in ranking.schemes else ranking.own)
    after, before = ranking.numbers(AFTER), ranking.numbers(start)
    effect = _effect(ranking, start)
    name = tuned.recipe.get("name", OWN)
    sentence = f"{tuned.steps:,} steps of {'training' if name == OWN else name} {effect}"
    if after["value"] is not None:
        sentence += f". {describe(after)}{_numbers_before(ranking, start, after['measure'])}"
    best = {"what": "tuned", "label": AFTER, "scheme": tuned.scheme, "sentence": sentence}
    best |= {"numbers": after, "before": before}
    return {"best": best, "runtimes": [], "factor": None, "helps": effect == HELPED}


def _numbers_before(ranking: Ranking, start: str, loss: str) -> str:
    """Return a sentence: loss, the verdict's metrics, kept context, and significant changes."""
    at, facts = ranking.length, list[str]()
    significant = set[str]().union(*ranking.compared(AFTER, start, at))
    # the baseline's loss is in the sentence already
    losses = ([loss] if start != ranking.own else []) + sorted(significant - {loss, KEPT})
    for name in (*losses, KEPT):
        metric, results = metrics()[name], ranking.results[name]
        if (value := ranking.value(name, start, at)) is None:
            continue
        number = metric.format(value.mean)
        what = "loss" if name == loss else metric.title.lower()
        fact = f"it kept {number} of far context" if name == KEPT else f"the {what} was {number}"
        change = results.difference((AFTER, at), (start, at))
        if change and change.n > 1 and name in {loss, *significant}:
            unit, scale = (".0f", 100) if name == KEPT else (".3f", 1)
            low, high = (format(scale * bound, f"+z{unit}") for bound in (change.low, change.high))
            fact += f" (change {low} to {high}{' points' * (name == KEPT)})"
        facts.append(fact)
    listed = " and ".join(filter(None, [", ".join(facts[:-1]), *facts[-1:]]))
    return f" Before training {listed}." if facts else ""


def _effect(ranking: Ranking, start: str) -> str:
    """Describe what training changed significantly at the target."""
    at = ranking.length
    if not (ranking.loss(AFTER, at) and ranking.loss(start, at)):
        return f"can't be judged: before or after training has no number at {at:,} tokens"
    better, worse = ranking.compared(AFTER, start, at)
    if better and worse:
        return f"{HELPED} by {_listed(better)}, and made it worse by {_listed(worse)}"
    if not better:
        return "made it worse" if worse else "made no significant difference"
    numbers = ranking.numbers(AFTER)
    effect = HELPED if numbers["measure"] in better else f"{HELPED} by {_listed(better)}"
    if numbers["sane"]:
        return effect
    return (
        f"{effect}, but not enough: its loss is over half a nat above the baseline's in its window"
    )


def _listed(measures: Collection[str]) -> str:
    return " and ".join(sorted(metrics()[name].title.lower() for name in measures))


def next_steps(tuned: Tuned) -> list[tuple[str, str]]:
    """Return the commands to run next. A model without rotation needs no export: transformers reads
    its checkpoint directly, and an adapter once it is merged."""
    folder = shlex.quote(tuned.folder)
    use = f'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("{tuned.folder}")'
    steps = [("Use it in Python", use)]
    if tuned.recipe.get("family") == "rope":
        steps.append(("Serve it", f"longitude export {folder} --for transformers,vllm"))
    elif tuned.kind == "adapter":
        merge = f'{use}\nlh.save(model, "{tuned.folder}-merged", tokenizer)'
        steps.append(("Merge it", merge))
    compare = f"longitude extend {folder} --to {2 * tuned.target}"
    return [*steps, ("Compare it with every method", compare)]


def numbers(rows: Sequence[Measurement], target: int) -> dict[str, Any]:
    """Return every method's numbers at every length, for `--json`."""
    from longitude.extension.rank import Ranking

    ranking = Ranking(rows, target)
    return {
        label: {
            name: {
                str(n): asdict(value)
                for n in results.lengths
                if (value := ranking.value(name, label, n)) is not None
            }
            for name, results in ranking.results.items()
            if name in metrics() and any(measured == label for measured, _ in results.numbers)
        }
        for label in ranking.schemes
    }
