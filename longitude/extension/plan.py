"""What `extend` measures, planned before anything runs: methods, tasks and the keys of rows.

A task is one method on one document, or one metric at one length. The keys of its rows are known
beforehand, so a task whose rows are all recorded is never run, and a killed run resumes where it
stopped. Kept context and retrieval are measured in rounds, each on further documents, so that later
rounds can be spent on the methods still in the race. User errors are raised here, before the first
measurement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longitude.core.progress import silent
from longitude.core.text import dump
from longitude.core.validate import UserError, shown, target_length
from longitude.eval.documents import Document, documents
from longitude.eval.records import BASELINE, COST, KEPT, LOSS, RETRIEVAL, ResultKey, Subject, Text
from longitude.eval.tasks import EvalProtocol, Metric, measured_by, metrics
from longitude.extension.candidates import by_length, candidates, family, label
from longitude.extension.rank import GOALS
from longitude.hf.loading import digest, load
from longitude.hf.patch import own_scheme, patched, scheme_of, trained_length
from longitude.hf.source import TINY
from longitude.options import ExtendOptions
from longitude.training.distributed import is_first_process


@dataclass(frozen=True, eq=False)
class TargetModel:
    """The loaded model under test, and the facts about it that are part of every row's key."""

    model: Any
    tokenizer: Any
    subject: Subject

    @classmethod
    def load(cls, model: Any, options: ExtendOptions) -> TargetModel:
        if not isinstance(model, str):
            name = getattr(model.config, "_name_or_path", "") or type(model).__name__
            return cls.of(model, options.tokenizer, name, options.revision)
        quiet = options.progress is silent or not is_first_process()
        loaded, tokenizer = load(model, **options.loading, quiet=quiet)
        return cls.of(loaded, tokenizer, model, options.revision)

    @classmethod
    def of(cls, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> TargetModel:
        if tokenizer is None:
            raise UserError(f"{name} has no tokenizer, and texts must be cut: add its files.")
        return cls(model, tokenizer, describe(model, name, revision))


def describe(model: Any, name: str, revision: str | None = None) -> Subject:
    """The facts about a model that are part of every row's key."""
    own, trained = own_scheme(model), trained_length(model)
    if trained is None:
        raise UserError(
            f"{name} does not state its trained length: set max_position_embeddings in its "
            f"config.json."
        )
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(
            f"{shown(name)} is no causal language model ({type(model).__name__}): extend measures "
            f"how well the next token is predicted."
        )
    parameter, rows = next(model.parameters()), getattr(own.layer(0).embed, "length", None)
    return Subject(
        name=name,
        weights=digest(model),
        scheme=dump(own),
        family=family(own),
        trained=trained if rows is None else min(trained, rows),  # RoBERTa has rows for padding
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        revision=revision,
    )


@dataclass(frozen=True)
class Method:
    """A candidate: its label, the full scheme that runs, and the scheme to patch the model with
    (None: the baseline)."""

    label: str
    scheme: str
    patch: str | None
    by_length: bool = False  # whether its numbers depend on the total length


@dataclass(frozen=True)
class Task:
    """One method on one document (loss and context), or one metric at one length."""

    method: Method
    measure: str
    document: int | None = None
    length: int = 0
    round: int = 0

    def __str__(self) -> str:
        at = f"at {self.length:,}" if self.document is None else f"of document {self.document + 1}"
        return f"{self.method.label}: {measured_by(self.measure).title.lower()} {at}"


@dataclass(frozen=True)
class Plan:
    """Everything that decides the rows of a run."""

    subject: Subject
    methods: tuple[Method, ...]
    lengths: tuple[int, ...]
    texts: tuple[Text, ...]
    protocol: EvalProtocol
    seed: int = 0

    @property
    def target(self) -> int:
        return self.lengths[-1]

    @property
    def measures(self) -> list[str]:
        """The kinds of rows other than loss and cost."""
        chosen = [metrics()[n].rows for n in self.protocol.selected if n in metrics()]
        return [*dict.fromkeys([*chosen, *([RETRIEVAL] if self.protocol.families else [])])]

    def to_json(self) -> dict[str, Any]:
        """What distinguishes this plan's rows from those of other runs in the same folder."""
        schemes, texts = [m.scheme for m in self.methods], [t.digest for t in self.texts]
        return {"schemes": schemes, "lengths": [*self.lengths], "texts": texts}

    def tasks(self, round: int = 0, methods: Sequence[Method] | None = None) -> list[Task]:
        """The tasks of a round, the most informative first. Tasks of one kind are adjacent, for all
        methods, so that whatever time allows is a comparison. The last round ends with costs."""
        methods = self.methods if methods is None else methods
        trained, last = self.subject.trained, round == self.protocol.rounds - 1
        ends = [n for n in (self.target, trained) if n in self.lengths]
        lengths = [*ends, *(n for n in self.lengths if n not in ends and round == 0)]
        measures = [m for m in self.measures if round == 0 or measured_by(m).repeated]
        kinds: list[dict[str, Any]] = [
            {"measure": m, "length": n} for n in lengths for m in measures
        ]
        if round == 0:
            first, *others = ({"measure": LOSS, "document": d} for d in range(len(self.texts)))
            kinds = [first, *kinds, *others]
        tasks = [
            Task(method, **kind, round=round)
            for kind in kinds
            for method in methods
            # past its window the baseline is measured in the first round only
            if round == 0 or method.label != BASELINE or kind["length"] <= trained
        ]
        if last and self.protocol.cost:
            tasks += [Task(m, COST, length=n) for n in ends for m in self.methods]
        return tasks

    def decides(self, task: Task) -> bool:
        """Whether a task helps to find the best method or those to skip: the loss of the first
        document, and kept context and retrieval at the target and at the trained length."""
        if task.document is not None:
            return task.document == 0
        return task.measure != COST and task.length in (self.target, self.subject.trained)

    def all_tasks(self) -> list[Task]:
        """The tasks of every round for every method: the most that a run measures."""
        return [task for round in range(self.protocol.rounds) for task in self.tasks(round)]

    def keys(self, task: Task) -> list[ResultKey]:
        """The keys of the rows that a task records."""
        kinds = [task.measure]
        if task.measure == LOSS:  # one forward serves all metrics that are always measured
            all_metrics = metrics().values()
            kinds = [m.rows for m in all_metrics if m.per == "document" and not m.selectable]
        return [key for kind in dict.fromkeys(kinds) for key in self._keys(measured_by(kind), task)]

    def _keys(self, metric: Metric, task: Task) -> Iterator[ResultKey]:
        method, document = task.method, task.document
        lengths = (task.length,) if document is None else self.lengths
        if metric.covers_shorter and not method.by_length:
            lengths = (self.target,)
        for length in lengths:
            protocol = {"version": self.protocol.version, **metric.settings(self.protocol)}
            if metric.covers_shorter:
                within = [n for n in self.lengths if n <= length]
                protocol["lengths"] = [length] if method.by_length else within
            if metric.repeated:  # it reads all documents
                protocol["texts"] = joint_digest(text.digest for text in self.texts)
            common = (metric.rows, self.subject, method.scheme, length)
            text = None if document is None else self.texts[document]
            in_round = {"round": task.round} if metric.repeated else {}
            seed = self.seed if metric.seeded else 0
            for at in metric.grid(self.protocol):
                yield ResultKey(*common, text, {**at, **in_round}, protocol, seed)


def joint_digest(digests: Iterable[str]) -> str:
    """One digest for several texts."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


@dataclass(eq=False)
class Prepared:
    """A plan, the model and documents to run it on, and notes on what was left out and why."""

    plan: Plan
    target: TargetModel
    documents: list[Document]
    held_out: list[Document]  # for --search
    options: ExtendOptions
    ranks: int = 1  # number of ranks that share each text
    sharing: str = ""  # why they do, in a sentence
    group: Any = None  # their process group, under torchrun
    leaders: Any = None  # process group of the first ranks of all such groups
    notes: list[str] = field(default_factory=list)


def prepare(target: TargetModel, to: int | str, options: ExtendOptions) -> Prepared:
    if options.docs < 1:
        raise UserError(f"--docs must be at least 1, but got {options.docs}.")
    subject = target.subject
    lengths = lengths_for(subject.name, subject.trained, to, options.lengths)
    if options.goal not in GOALS:
        raise UserError(f"--goal is {', '.join(GOALS)}, but got {shown(options.goal)}.")
    protocol = protocol_for(subject.trained, options.tasks, options.questions, options.cost)
    methods, notes = _methods(options.methods, target, lengths[-1])
    wanted = options.docs * (3 if options.search else 1)
    texts = documents(
        options.text, target.tokenizer, lengths[-1], wanted, options.seed, subject.name in TINY
    )
    if len(texts) < wanted:
        notes.append(f"the text has {len(texts)} documents of this length, not {wanted}")
    joined = sum(" and " in document.text.name for document in texts)
    if joined:
        notes.append(f"{joined} documents are several short texts, joined within one source")
    read, held_out = texts[: options.docs], texts[options.docs :]
    # documents of kept context in each round: as many as --docs, or as the texts have room for
    sizes = metrics()[KEPT].settings(protocol)
    room = len(read) * (lengths[-1] // (sizes["evidence"] + sizes["target"]))
    protocol = replace(protocol, stretches=max(1, min(len(read), room // protocol.rounds)))
    names = tuple(d.text for d in read)
    plan = Plan(subject, tuple(methods), lengths, names, protocol, options.seed)
    return Prepared(plan, target, read, held_out, options, notes=notes)


def protocol_for(
    trained: int, tasks: tuple[str, ...], questions: int | None, cost: bool
) -> EvalProtocol:
    """The evaluation protocol for a model with this window."""
    prompts = EvalProtocol.prompts if questions is None else questions
    return EvalProtocol(trained, tasks, prompts, cost=cost)


def lengths_for(
    name: str, trained: int, to: int | str, chosen: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The lengths to measure: the chosen ones, or 1, 2, 4, … windows; always window and target."""
    target = target_length(to, trained)
    if target <= trained:
        raise UserError(
            f"--to is {target:,} tokens, but {name} was trained to {trained:,}: it already "
            f"covers that; give a greater --to, for example {4 * trained}."
        )
    doubled = [trained * 2**k for k in range((target // trained).bit_length())]
    lengths = sorted({*(chosen or doubled), trained, target})
    if lengths[0] < 2 or lengths[-1] > target:
        raise UserError(
            f"--lengths lie between 2 and --to ({target:,}), but got {shown(lengths[0])} to "
            f"{shown(lengths[-1])}: leave out what lies beyond."
        )
    return tuple(lengths)


def _methods(names: str, target: TargetModel, length: int) -> tuple[list[Method], list[str]]:
    """Apply each candidate once; one that fails is an error, or left out of `auto` with a note."""
    model, own = target.model, own_scheme(target.model)
    automatic = any(word.strip() in ("auto", "all") for word in names.split(";"))
    methods: dict[str, Method] = {}
    notes = []
    for candidate in candidates(names, own, target.subject.trained, length):
        try:
            full = own
            if candidate.text is not None:
                with patched(model, candidate.text, check=False):
                    full = scheme_of(model)
        except UserError as error:
            if not automatic:
                raise
            notes.append(f"{candidate.name} was left out: {error}")
            continue
        dynamic = candidate.text is not None and by_length(full)
        method = Method(label(full, own), dump(full), candidate.text, dynamic)
        methods.setdefault(method.scheme, method)
    labels = [m.label for m in methods.values()]
    return [
        m if labels.count(m.label) == 1 else replace(m, label=m.scheme) for m in methods.values()
    ], notes
