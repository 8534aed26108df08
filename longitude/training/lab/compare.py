"""The lab: every scheme trained on the same data in the same order, then tested at every length.

Each row (a scheme, a seed, a task, a length) is recorded under the content that decides it: the
run, the protocol, the task and the length. A row that is there is not computed again, and a model
is trained only where a row is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.core.store import Store, address
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.training.checkpoint import Folder
from longitude.training.distributed import World
from longitude.training.lab.config import SIZES
from longitude.training.lab.measure import Examiner, Protocol
from longitude.training.lab.options import Asked
from longitude.training.lab.pipeline import load, trained
from longitude.training.lab.rows import TEXT, Score, read
from longitude.training.lab.run import Run, shares
from longitude.training.lab.text import Corpus, excerpts
from longitude.training.lab.trainable import chosen
from longitude.training.loop import Manner


@dataclass(frozen=True)
class Plan:
    """What a lab compares: runs, the tasks and the lengths they are tested at, and how."""

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    protocol: Protocol

    def keys(self, run: Run) -> Iterator[tuple[dict[str, Any], str, int]]:
        """The record's key of every row of a run, with its task and length."""
        for task in self.tasks:
            for length in self.lengths:
                key = {
                    "kind": "lab", "run": run.plain(), "protocol": self.protocol.plain(),
                    "task": task, "length": length,
                }  # fmt: skip
                if task == TEXT:  # excerpts are cut for the greatest length
                    key["longest"] = max(self.lengths)
                yield key, task, length


def plan(
    asked: Asked,
    schemes: str,
    lengths: tuple[int, ...],
    seeds: tuple[int, ...],
    protocol: Protocol,
    corpus: Corpus,
    world: World,
) -> Plan:
    """What is asked for, checked whole; without lengths, from one window to sixteen."""
    lengths = lengths or tuple(asked.length * 2**k for k in range(5))
    layers = SIZES[asked.size].layers if asked.size in SIZES else 1
    each = chosen(schemes, asked.length, layers)
    runs = tuple(asked.run(s, seed, corpus, world) for s in each for seed in seeds)
    tasks = tuple(name for name, _ in shares(asked.tasks))
    if not seeds:
        raise UserError("--seeds names none: give some, as in 0,1,2.")
    if min(lengths) < 2:
        raise UserError(f"--test needs at least two tokens, but got {min(lengths)}: give more.")
    if TEXT in tasks:
        excerpts(corpus, max(lengths) + 1, protocol.excerpts, protocol.seed)
    return Plan(runs, tasks, lengths, protocol)


@dataclass(frozen=True)
class Watch:
    """Who hears what the lab does: which run is next, and how its training goes."""

    run: Callable[[int, Run, str], None] = lambda index, run, doing: None
    manner: Manner = Manner()  # noqa: RUF009 (frozen)


def compare(
    plan: Plan, corpus: Corpus, store: Store, out: Path, world: World, watch: Watch
) -> tuple[Score, ...]:
    """Compute what the store lacks; then every row of the plan."""
    for index, run in enumerate(plan.runs):
        missing = [k for k in plan.keys(run) if store.get(k[0]) is None]
        if not world.agree(bool(missing)):
            watch.run(index, run, "recorded")
            continue
        folder = Folder(out / slug(run))
        if not world.agree(folder.done):
            watch.run(index, run, "training")
            trained(run, corpus, folder, world, watch.manner)
        watch.run(index, run, "testing")
        if world.first:
            model = load(folder.path, device=world.device)
            examiner = Examiner(model, corpus, max(plan.lengths), plan.protocol, run.dtype)
            for key, task, length in missing:
                store.put(key, examiner.score(task, length))
        world.wait()
    return tuple(scores(plan, store)) if world.first else ()


def scores(plan: Plan, store: Store) -> Iterator[Score]:
    """The rows of a plan that the store has."""
    for run in plan.runs:
        for key, _, _ in plan.keys(run):
            if (value := store.get(key)) is not None:
                yield _score(key, value)


def recorded(store: Store) -> Iterator[Score]:
    """Every row of a lab that the store has, whatever it was asked for."""
    return (_score(row.key, row.value) for row in store.rows(kind="lab"))


def _score(key: dict[str, Any], value: dict[str, Any]) -> Score:
    shape = key["run"]["shape"]
    told = {"scheme": shape["scheme"], "label": label(shape["scheme"]), "trained": shape["length"]}
    return read(
        {**told, "seed": key["run"]["seed"], "task": key["task"], "length": key["length"], **value}
    )


def label(scheme: str) -> str:
    """A short name for tables: NoPE for what has no positions, the written form otherwise, with
    layers that repeat told once."""
    names = {"causal()": "nope"}
    return names.get(scheme) or _counted(scheme)


def _counted(scheme: str) -> str:
    parsed = parse(scheme)
    each = [dump(parsed.layer(i)) for i in range(len(parsed))]
    runs: list[tuple[str, int]] = []
    for text in each:
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return ", ".join(f"{n} × ({text})" if n > 1 else text for text, n in runs)


def slug(run: Run) -> str:
    """A folder's name for a run: readable, and its own."""
    written = re.sub(r"[^a-z0-9]+", "-", run.shape.scheme.lower()).strip("-")[:40].strip("-")
    return f"{written}-seed{run.seed}-{address(run.plain())[:10]}"
