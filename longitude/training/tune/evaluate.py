"""What a fine-tune changed: `extend`'s measurements before and after it, and their report.

Three methods read the same documents and answer the same questions: the baseline, the base model
under the new scheme (before), and the trained model (after). The documents are the tenth of the
text that training never sees, unless others are given. Rows are stored by the weights that they
were measured on, so nothing is measured twice.
"""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longitude.core.progress import Event
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.documents import Document, cut
from longitude.eval.records import BASELINE, PASSKEY, Measurement, Subject
from longitude.eval.results import KINDS
from longitude.eval.tasks.passkey import form_for
from longitude.extension import folder as folders
from longitude.extension.candidates import by_length
from longitude.extension.measure import Bench
from longitude.extension.pipeline import writable
from longitude.extension.plan import Method, Plan, Protocol
from longitude.extension.prepare import QUESTIONS, TAIL, Options, lengths_of, subject
from longitude.extension.ranking import Case
from longitude.extension.recommend import story
from longitude.extension.run import News, local, measured, missing
from longitude.hf.loading import load, without_weights
from longitude.hf.source import find
from longitude.training.data import gather
from longitude.training.loop import Stopped
from longitude.training.tune.recipes import OWN
from longitude.training.tune.run import Tuned, TuneOptions

BEFORE, AFTER = "before", "after"
REPORT = "report"  # the folder of a run's measurements
HELPED = "helped"


@dataclass(frozen=True, eq=False)
class TestSet:
    """The lengths and the documents that a fine-tune is measured on, and the base's tokenizer."""

    __test__ = False  # not pytest's

    lengths: tuple[int, ...]
    documents: list[Document]
    tokenizer: Any


def make_test_set(model: str, to: str, options: TuneOptions) -> TestSet:
    """The test set; every mistake is raised here, before weights are read."""
    if options.docs < 1:
        raise UserError(f"--docs must be at least 1, but got {options.docs}.")
    Protocol(1, options.tasks, 1 if options.questions is None else options.questions)
    trained, tokenizer = without_weights(
        model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    if trained is None or tokenizer is None:
        lacks = "tokenizer" if trained is not None else "trained length in its config.json"
        raise UserError(f"{model} has no {lacks}, and texts must be cut: add it.")
    lengths = lengths_of(Options(model=model, to=to, lengths=options.lengths), trained)
    corpus = gather([*(options.test or options.text)] or None)
    # texts that are given for tests are read in full
    held_out = [*corpus.train, *corpus.test] if options.test else [*corpus.test]
    texts = [(f"{corpus.name}, part {n + 1}", text.decode()) for n, text in enumerate(held_out)]
    try:
        documents = cut(texts, tokenizer, lengths[-1], options.docs, options.seed)
    except UserError as error:
        what = "--test" if options.test else "what is held out of training to measure on"
        raise UserError(
            f"{what} is too short ({str(error).partition(':')[0]}): give more with --text or "
            f"--test, or skip the measurements with --no-measure."
        ) from error
    return TestSet(lengths, documents, tokenizer)


def check_base(model: str, options: TuneOptions) -> None:
    """Raise for an adapter that is to get another adapter on top, which nothing could load."""
    if find(model, options.revision).adapter is not None and options.lora is not False:
        raise UserError(
            f"{model} is an adapter, and one on top of it would have no base: merge it first "
            f"(longitude export {model}), or train it --full."
        )


def evaluate(
    test_set: TestSet, model: str, tuned: Tuned, options: TuneOptions, store: Store
) -> list[Measurement]:
    """Measure what the store lacks of baseline, before and after; their rows, as the base's."""
    before = _measure(
        test_set, model, options.revision, lambda base: _base_methods(base, tuned), options, store
    )
    after = _measure(
        test_set, tuned.folder, None, lambda base: [_method(AFTER, tuned)], options, store
    )
    scheme = f"{tuned.scheme} after {tuned.steps:,} steps"  # a name that no scheme has
    rows = [
        replace(row, key=replace(row.key, subject=before.subject, scheme=scheme))
        for row in measured(after, store)
    ]
    return [*measured(before, store), *rows]


def _base_methods(base: Subject, tuned: Tuned) -> list[Method]:
    baseline = Method(BASELINE, base.scheme, None)
    if tuned.scheme == base.scheme:
        return [baseline]
    return [baseline, replace(_method(BEFORE, tuned), patch=tuned.scheme)]


def _method(label: str, tuned: Tuned) -> Method:
    return Method(label, tuned.scheme, None, by_length(parse(tuned.scheme)))


def _measure(
    test_set: TestSet,
    name: str,
    revision: str | None,
    methods: Callable[[Subject], Sequence[Method]],
    options: TuneOptions,
    store: Store,
) -> Plan:
    """Measure one model; it is gone when the next one comes."""
    model, tokenizer = load(
        name,
        device=options.device,
        dtype=options.dtype,
        revision=revision,
        trust_remote_code=options.trust_remote_code,
        quiet=True,
    )
    about = subject(model, name, revision)
    trained = test_set.lengths[0]
    protocol = Protocol(
        tail=min(TAIL, trained // 2),
        tasks=options.tasks,
        questions=options.questions or QUESTIONS[about.device == "cpu"],
        form=form_for(trained),
        cost=False,
    )
    texts = tuple(d.text for d in test_set.documents)
    plan = Plan(about, tuple(methods(about)), test_set.lengths, texts, protocol, options.seed)

    def watch(news: News) -> None:
        stage = f"{news.task.method.label}: {news.task.measure}"
        options.progress(Event(stage, news.share, 1.0, "measure", seconds_left=news.left))

    tokenizer = tokenizer or test_set.tokenizer  # a checkpoint of weights alone has its base's
    local(Bench(plan, model, tokenizer, test_set.documents))(
        plan, missing(plan, store), store, watch
    )
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return plan


def summarise(rows: Sequence[Measurement], tuned: Tuned) -> dict[str, Any]:
    """What training changed, as recommendation.json has it."""
    case = Case(rows, tuned.target)
    start = str(BEFORE if BEFORE in case.schemes else case.own)
    after, before = case.numbers(AFTER), case.numbers(start)
    effect = _effect(case, start)
    name = tuned.recipe.get("name", OWN)
    sentence = f"{tuned.steps:,} steps of {'training' if name == OWN else name} {effect}"
    if after["value"] is not None:
        sentence += f": {story(after, True)}{_compared(case, start)}."
    best = {"what": "tuned", "label": AFTER, "scheme": tuned.scheme, "sentence": sentence}
    best |= {"numbers": after, "before": before}
    return {"best": best, "runtimes": [], "factor": None, "helps": effect == HELPED}


def _effect(case: Case, start: str) -> str:
    """What training did at the target, as far as the numbers show."""
    after, before = (case.value(case.measure, label, case.length) for label in (AFTER, start))
    if after is None or before is None:
        return f"can't be judged: before or after training has no number at {case.length:,} tokens"
    if case.alike(case.measure, AFTER, start, case.length):
        return "made no significant difference"
    better = (after.mean < before.mean) == KINDS[case.measure].lower_is_better
    return HELPED if better else "made it worse"


def _compared(case: Case, start: str) -> str:
    """Before training: its number with the paired difference, and its passkeys."""
    at, facts = case.length, []
    before = case.value(case.measure, start, at)
    if before is not None and start != case.own:  # the baseline's number stands there already
        gap = case.sheets[case.measure].difference((AFTER, at), (start, at))
        paired = f" (change {gap.low:+.3f} to {gap.high:+.3f})" if gap and gap.n > 1 else ""
        facts.append(f"it was {before.mean:.3f}{paired}")
    passkeys = case.value(PASSKEY, start, at) if case.measure != PASSKEY else None
    facts += [f"it retrieved {passkeys.mean:.0%} of passkeys"] if passkeys else []
    return f"; before training {' and '.join(facts)}" if facts else ""


def next_commands(tuned: Tuned) -> list[tuple[str, str]]:
    """What to type next. A model without rotation needs no export: transformers reads its
    checkpoint directly, and an adapter once it is merged."""
    folder = shlex.quote(tuned.folder)
    use = f'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("{tuned.folder}")'
    commands = [("Use it in Python", use)]
    if tuned.recipe.get("family") == "rope":
        commands.append(("Serve it", f"longitude export {folder} --for transformers,vllm"))
    elif tuned.kind == "adapter":
        merge = f'{use}\nlh.save(model, "{tuned.folder}-merged", tokenizer)'
        commands.append(("Merge it", merge))
    compare = f"longitude extend {folder} --to {2 * tuned.target}"
    return [*commands, ("Compare it with every method", compare)]


def evaluate_and_report(
    test_set: TestSet, model: str, tuned: Tuned, options: TuneOptions
) -> tuple[list[Measurement], dict[str, Any]]:
    """Measure, and write the report into the run's folder; the rows, and what it says of them."""
    folder = writable(Path(tuned.out) / REPORT)
    with Store(folder / folders.STORE) as store:
        try:
            rows = evaluate(test_set, model, tuned, options, store)
        except KeyboardInterrupt:
            raise Stopped(
                f"{tuned.folder} is complete; the same command continues its measurements."
            ) from None
        summary, commands = summarise(rows, tuned), next_commands(tuned)
        folders.write(folder, store, rows, summary, commands)
        return rows, {**summary, "next": folders.listed(commands)}


def numbers(rows: Sequence[Measurement], tuned: Tuned) -> dict[str, Any]:
    """Every method's numbers at every length, for `--json`."""
    case = Case(rows, tuned.target)
    return {
        label: {
            name: {
                str(n): asdict(value)
                for n in sheet.lengths
                if (value := case.value(name, label, n)) is not None
            }
            for name, sheet in case.sheets.items()
            if name in KINDS and any(s == label for s, _ in sheet.numbers)
        }
        for label in case.schemes
    }
