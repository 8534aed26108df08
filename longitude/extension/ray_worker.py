"""A worker of a cluster: another process, perhaps elsewhere, that measures what this one would.

An errand is what it is given at once: a method's reading of one document, all lengths of one kind
of question (whether a longer one is asked depends on the one before), or a method's cost. It loads
the model once, takes the plan and the documents as they are, and hands rows back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from longitude.core.store import Store, address
from longitude.core.validate import UserError
from longitude.eval.documents import Document
from longitude.eval.records import Text
from longitude.extension.measure import Bench
from longitude.extension.plan import Plan, Task
from longitude.extension.prepare import Options, Prepared
from longitude.extension.run import do
from longitude.hf.loading import digest, load
from longitude.hf.source import TINY, find

Errand = tuple[Task, ...]
Pair = tuple[dict[str, Any], dict[str, Any]]  # a row's key and value
CPUS = 1  # of a worker, and its threads


def errands(todo: Sequence[Task]) -> list[Errand]:
    """The tasks by what goes to a worker at once, shorter lengths before longer ones."""
    found: dict[Any, list[Task]] = {}
    for task in todo:
        found.setdefault((task.method, task.measure, task.document), []).append(task)
    return [tuple(sorted(group, key=lambda task: task.length)) for group in found.values()]


def known_of(plan: Plan, errand: Errand, store: Store) -> list[Pair]:
    """The recorded rows that decide whether longer questions are asked."""
    first = errand[0]
    if first.measure not in plan.protocol.tasks:
        return []
    every = (
        a.to_json() for t in plan.questions(first.method, first.measure) for a in plan.asked(t)
    )
    return [(key, value) for key in every if (value := store.get(key)) is not None]


@dataclass(frozen=True)
class Kit:
    """What every worker is given: plain values, so that it measures what this process would."""

    options: Options
    plan: Plan
    documents: tuple[tuple[Text, list[int], int], ...]

    @classmethod
    def of(cls, prepared: Prepared) -> Kit:
        source = find(prepared.options.model, prepared.options.revision)
        here = source.gguf or (source.folder if source.name not in TINY else None)
        # workers have other working directories
        options = replace(prepared.options, model=str(here.resolve()) if here else source.name)
        documents = ((d.text, d.ids.tolist(), d.first) for d in prepared.bench.documents)
        return cls(options, prepared.plan, tuple(documents))

    def bench(self) -> Bench:
        """The model, loaded here; raises unless it is the one that was planned for."""
        about, options = self.plan.subject, self.options
        model, tokenizer = load(
            options.model,
            device=about.device,
            dtype=about.dtype,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            quiet=True,
        )
        if (found := digest(model)) != about.weights:
            raise UserError(
                f"{about.name} has other weights here ({found}) than where the run began "
                f"({about.weights}): give every machine of the cluster the same files."
            )
        documents = [Document(text, torch.tensor(ids), n) for text, ids, n in self.documents]
        return Bench(self.plan, model, tokenizer, documents)


class Worker:
    """One process of the cluster. What it can't do for the user's mistake it answers in a sentence,
    since trying again would not help; any other failure it raises."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit

    @cached_property
    def bench(self) -> Bench:
        torch.set_num_threads(CPUS)
        return self.kit.bench()

    def begin(self) -> list[Pair] | str:
        """Load the model: no rows yet."""
        return self.measure((), [])

    def measure(self, errand: Errand, known: Sequence[Pair]) -> list[Pair] | str:
        """The rows of an errand, beside those that are known."""
        try:
            bench = self.bench
            with Store(":memory:") as store:
                for key, value in known:
                    store.put(key, value)
                for task in errand:
                    do(bench, task, store)
                before = {address(key) for key, _ in known}
                return [(r.key, r.value) for r in store.rows() if address(r.key) not in before]
        except UserError as mistake:
            return str(mistake)
