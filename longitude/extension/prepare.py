"""What is measured: a loaded model, what it was trained to, and a digest of its weights.

From what was asked for to a plan and a model that can run it; every mistake is told here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.eval.documents import Document, documents
from longitude.eval.records import Subject
from longitude.eval.tasks.passkey import form_for
from longitude.extension.candidates import Candidate, by_length, candidates, family, label
from longitude.extension.measure import Bench
from longitude.extension.plan import Method, Plan, Protocol
from longitude.hf.loading import digest, load
from longitude.hf.patch import own_scheme, patched, scheme_of, trained_length
from longitude.hf.source import TINY
from longitude.runtimes.support import serves


def subject(model: Any, name: str, revision: str | None = None) -> Subject:
    """The facts of a model that stand in the key of every row."""
    own = own_scheme(model)
    trained = trained_length(model)
    if trained is None:
        raise UserError(
            f"{name} does not say how long it was trained to: set max_position_embeddings in its "
            f"config.json."
        )
    if getattr(model.config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(
            f"{shown(name)} is no causal language model ({type(model).__name__}): extend measures "
            f"how well the next token is told."
        )
    parameter = next(model.parameters())
    return Subject(
        name=name,
        weights=digest(model),
        scheme=dump(own),
        family=family(own),
        trained=trained,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        revision=revision,
    )


TAIL = 1024  # tokens of the end that are scored, or half a smaller window
QUESTIONS = (4, 2)  # in a cell, with an accelerator and without


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    model: str = "tiny-rope"
    to: str = "4x"
    methods: str = "auto"
    lengths: tuple[int, ...] = ()
    text: tuple[str, ...] = ()
    docs: int = 4
    apart: int = 0  # documents more, for a search
    tasks: tuple[str, ...] = ("passkey",)
    questions: int | None = None
    cost: bool = True
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    quiet: bool = False


@dataclass(eq=False)
class Prepared:
    """A plan, what can run it, and what was left out of it and why."""

    plan: Plan
    bench: Bench
    apart: list[Document]
    options: Options  # for another machine to load the same model
    notes: list[str] = field(default_factory=list)

    def served(self) -> dict[str, tuple[str, ...]]:
        """Which runtimes can serve each method as it is, by its label."""
        own = own_scheme(self.bench.model)
        return {m.label: serves(parse(m.scheme), own) for m in self.plan.methods}


def prepare(options: Options) -> Prepared:
    """Load the model, and lay out what is to be measured."""
    if options.docs < 1:
        raise UserError(f"--docs must be at least 1, but got {options.docs}.")
    model, tokenizer = load(
        options.model,
        device=options.device,
        dtype=options.dtype,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        quiet=options.quiet,
    )
    if tokenizer is None:
        raise UserError(f"{options.model} has no tokenizer, and texts must be cut: add its files.")
    about = subject(model, options.model, options.revision)
    lengths = lengths_of(options, about.trained)
    few = options.questions
    protocol = Protocol(
        tail=min(TAIL, about.trained // 2),
        tasks=options.tasks,
        questions=QUESTIONS[about.device == "cpu"] if few is None else few,
        form=form_for(about.trained),
        cost=options.cost,
    )
    methods, notes = _methods(options, model, about.trained, lengths[-1])
    wanted = options.docs + options.apart
    unseen = options.model in TINY
    found = documents(options.text, tokenizer, lengths[-1], wanted, options.seed, unseen)
    notes += _few(len(found), wanted)
    read, apart = found[: options.docs], found[options.docs :]
    texts = tuple(d.text for d in read)
    plan = Plan(about, tuple(methods), lengths, texts, protocol, options.seed)
    return Prepared(plan, Bench(plan, model, tokenizer, read), apart, options, notes)


def _few(found: int, wanted: int) -> list[str]:
    return [f"the text has {found} documents of this length, not {wanted}"] * (found < wanted)


def lengths_of(options: Options, trained: int) -> tuple[int, ...]:
    """The lengths to measure at: those asked for, or one window, two, four … to the target."""
    target = target_of(options.to, trained)
    if target <= trained:
        raise UserError(
            f"--to is {target:,} tokens, but {options.model} was trained to {trained:,}: it reads "
            f"that already; give more, for example --to {4 * trained}."
        )
    doubled = [trained * 2**k for k in range((target // trained).bit_length())]
    found = sorted({*(options.lengths or doubled), trained, target})
    if found[0] < 2 or found[-1] > target:
        raise UserError(
            f"--lengths lie between 2 and --to ({target:,}), but got {shown(found[0])} to "
            f"{shown(found[-1])}: leave out what lies beyond."
        )
    return tuple(found)


def target_of(text: str, trained: int) -> int:
    """A number of tokens: 32768, 32k, or 4x the trained window."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([xk]?)", text.strip().lower().replace(",", ""))
    if match is None:
        raise UserError(f"--to takes a length, but got {shown(text)}: write 32768, 32k or 4x.")
    number, unit = float(match[1]), match[2]
    return round(number * {"": 1, "k": 1024, "x": trained}[unit])


def _methods(
    options: Options, model: Any, trained: int, target: int
) -> tuple[list[Method], list[str]]:
    """Each candidate put on the model once: what it can't run is told, or left out of `auto`."""
    own = own_scheme(model)
    asked = candidates(options.methods, own, trained, target)
    chosen = any(word in ("auto", "all") for word in map(str.strip, options.methods.split(";")))
    found: dict[str, Method] = {}
    notes = []
    for one in asked:
        try:
            method = _method(one, model, own)
        except UserError as mistake:
            if not chosen:
                raise
            notes.append(f"{one.name} was left out: {mistake}")
            continue
        found.setdefault(method.scheme, method)
    return _told_apart([*found.values()]), notes


def _method(one: Candidate, model: Any, own: Any) -> Method:
    if one.text is None:
        return Method(label(own, own), dump(own), None)
    with patched(model, one.text, check=False):
        full = scheme_of(model)
    return Method(label(full, own), dump(full), one.text, by_length(full))


def _told_apart(methods: Sequence[Method]) -> list[Method]:
    """Two schemes under one label would be taken for one: such go by their written forms."""
    labels = [m.label for m in methods]
    return [
        m if labels.count(m.label) == 1 else Method(m.scheme, m.scheme, m.patch, m.by_length)
        for m in methods
    ]
