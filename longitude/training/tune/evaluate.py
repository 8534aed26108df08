"""The measurements of `extend` before and after training, on text that was held out of it.

Three ways to read the same documents and answer the same questions: the model as it is, the model
under the new scheme (before), and what was trained (after). The tenth of the text that training
never sees (lab/text.py) is for this, unless other texts are named. Rows are kept by the weights
that they were measured on, so nothing is measured twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from longitude.core.progress import Progress
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.documents import Document, cut
from longitude.eval.records import BASELINE, Measurement, Subject
from longitude.eval.tasks import EvalProtocol
from longitude.extension.candidates import by_length
from longitude.extension.measure import MeasureOptions, measure
from longitude.extension.plan import Method, TargetModel, lengths_for, protocol_for
from longitude.hf.loading import load, without_weights
from longitude.hf.source import find
from longitude.training.lab.text import gather
from longitude.training.tune.options import Asked, Tuned

BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Exam:
    """How a tuned model is measured: on which texts (without any, what training holds out)."""

    test: tuple[str, ...] = ()
    docs: int = 4
    tasks: tuple[str, ...] = ("passkey",)
    questions: int | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Paper:
    """An exam that can be sat: its documents and lengths."""

    exam: Exam
    lengths: tuple[int, ...]
    documents: list[Document]


def set_paper(exam: Exam, asked: Asked) -> Paper:
    """The exam of what is asked for; every mistake is told here, before weights are read."""
    if exam.docs < 1:
        raise UserError(f"--docs must be at least 1, but got {exam.docs}.")
    EvalProtocol(1, exam.tasks, 1 if exam.questions is None else exam.questions)
    trained, tokenizer = without_weights(
        asked.model, revision=asked.revision, trust_remote_code=asked.trust_remote_code
    )
    if trained is None or tokenizer is None:
        lacks = "tokenizer" if trained is not None else "trained length in its config.json"
        raise UserError(f"{asked.model} has no {lacks}, and texts must be cut: add it.")
    lengths = lengths_for(asked.model, trained, asked.to, exam.lengths)
    return Paper(exam, lengths, _documents(exam, asked, tokenizer, lengths[-1]))


def check_base(asked: Asked) -> None:
    """Raise for an adapter that is to get another adapter on top, which nothing could load."""
    source = find(asked.model, asked.revision)
    if source.adapter is not None and asked.trained != "full":
        raise UserError(
            f"{asked.model} is an adapter, and one on top of it would have no base: merge it first "
            f"(longitude export {asked.model}), or train it --full."
        )


def _documents(exam: Exam, asked: Asked, tokenizer: Any, length: int) -> list[Document]:
    corpus = gather([*(exam.test or asked.text)] or None)
    # texts that are named for it are read whole
    held = [*corpus.train, *corpus.test] if exam.test else [*corpus.test]
    texts = [(f"{corpus.name}, part {n + 1}", text.decode()) for n, text in enumerate(held)]
    try:
        return cut(texts, tokenizer, length, exam.docs, asked.seed)
    except UserError as mistake:
        what = "--test" if exam.test else "what is held out of training to measure on"
        raise UserError(
            f"{what} is too short ({str(mistake).partition(':')[0]}): give more with --text or "
            f"--test, or leave the measurements out by --no-measure."
        ) from mistake


def sit(
    paper: Paper, asked: Asked, tuned: Tuned, store: Store, progress: Progress
) -> list[Measurement]:
    """Measure what the store lacks of all three; their rows, as rows of the base."""
    before, about = _measured(
        paper, asked, asked.model, lambda m: _base_methods(m, tuned), store, progress
    )
    after, _ = _measured(
        paper, asked, tuned.folder, lambda m: (_tuned_method(m, tuned),), store, progress
    )
    return [*before, *(_as_base(one, about, tuned) for one in after)]


def _measured(
    paper: Paper,
    asked: Asked,
    name: str,
    methods: Callable[[Subject], Sequence[Method]],
    store: Store,
    progress: Progress,
) -> tuple[list[Measurement], Subject]:
    """The rows of one model; the model is gone when the next one comes."""
    tuned = name != asked.model
    model, tokenizer = load(
        name,
        device=asked.device,
        dtype=asked.dtype,
        revision=None if tuned else asked.revision,
        trust_remote_code=asked.trust_remote_code,
        quiet=True,
    )
    if tokenizer is None:  # a checkpoint of weights alone reads with its base's
        _, tokenizer = without_weights(asked.model, revision=asked.revision)
    target = TargetModel.of(model, tokenizer, name, None if tuned else asked.revision)
    about, exam = target.subject, paper.exam
    # the same for all: by the window that the base has
    protocol = protocol_for(paper.lengths[0], about.device, exam.tasks, exam.questions, False)
    options = MeasureOptions(paper.documents, paper.lengths, protocol, asked.seed)
    rows = measure(target, methods(about), options, store, progress)
    del model, target
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows, about


def _base_methods(about: Subject, tuned: Tuned) -> tuple[Method, ...]:
    own = Method(BASELINE, about.scheme, None)
    if tuned.scheme == about.scheme:
        return (own,)
    return own, Method(BEFORE, tuned.scheme, tuned.scheme, by_length(parse(tuned.scheme)))


def _tuned_method(about: Subject, tuned: Tuned) -> Method:
    return Method(AFTER, tuned.scheme, None, by_length(parse(tuned.scheme)))


def _as_base(one: Measurement, base: Subject, tuned: Tuned) -> Measurement:
    """A row of the tuned model for the base's table: under a name that no scheme has."""
    scheme = f"{tuned.scheme} after {tuned.steps:,} steps"
    return replace(one, key=replace(one.key, subject=base, scheme=scheme))
