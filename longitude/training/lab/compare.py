"""Train short, test long: every scheme trained on the same data in the same order, then tested at
lengths that it never saw.

Text: the same excerpts at every length, cut from the front, so that the same last tokens are scored
with more and more context. Tasks: fresh problems, each as large as the length allows; an answer
counts if every byte of it is the most likely one (what greedy decoding would produce).

Each row (a scheme, a seed, a task, a length) is stored under what decides it: the run, the
protocol, the task and the length. A stored row is not computed again, and a model is trained only
if a row is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.core.progress import Event
from longitude.core.scheme import Split
from longitude.core.store import Store, address
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.eval.perplexity import by_position, tail, token_losses
from longitude.training.data import Corpus, excerpts
from longitude.training.distributed import World, generator
from longitude.training.lab.model import SIZES, Decoder
from longitude.training.lab.rows import TEXT, Score, read_score
from longitude.training.lab.run import (
    Run,
    RunOptions,
    lab_folder,
    load,
    make_run,
    shares,
    train_run,
)
from longitude.training.lab.tasks import accuracy, task
from longitude.training.lab.trainable import chosen

TOKENS_AT_ONCE = 2**15


@dataclass(frozen=True)
class Protocol:
    """How models are tested; a part of every row's key. `tail` tokens of each excerpt are scored,
    by default half the trained window."""

    excerpts: int = 16
    problems: int = 64
    tail: int | None = None
    seed: int = 0
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("excerpts", "problems"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, but got {getattr(self, name)}.")


class Evaluator:
    """Tests one model; the excerpts are cut once, for the greatest length."""

    def __init__(
        self, model: Decoder, corpus: Corpus | None, longest: int, protocol: Protocol, dtype: str
    ) -> None:
        self.model, self.protocol, self.dtype = model.eval(), protocol, dtype
        self.window = model.config.length
        self.text = corpus and excerpts(corpus, longest + 1, protocol.excerpts, protocol.seed)

    def score(self, name: str, length: int) -> dict[str, Any]:
        """One row: a value, and for text its curve; or the sentence in which it was refused."""
        try:
            return self._text(length) if name == TEXT else self._task(name, length)
        except UserError as error:
            return {"value": None, "refused": str(error), "curve": []}

    def _text(self, length: int) -> dict[str, Any]:
        assert self.text is not None
        losses = token_losses(self._logits, self.text[:, -length - 1 :])
        last = self.protocol.tail or max(1, self.window // 2)
        curve = [list(stretch) for stretch in by_position(losses)]
        return {"value": tail(losses, min(last, length)), "refused": None, "curve": curve}

    def _task(self, name: str, length: int) -> dict[str, Any]:
        rng = generator(self.protocol.seed, length, f"test {name}")
        rows = task(name, self.window).rows(rng, self.protocol.problems, length, vary=False)
        parts = rows.tokens[:, :-1].split(max(1, TOKENS_AT_ONCE // length))
        predicted = torch.cat([self._logits(part).argmax(-1).cpu() for part in parts])
        return {"value": accuracy(predicted, rows), "refused": None, "curve": []}

    @torch.no_grad()
    def _logits(self, tokens: Int[Tensor, "b n"]) -> Tensor:
        device = self.model.tokens.weight.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            return self.model(tokens.to(device))


@dataclass(frozen=True)
class Plan:
    """What a lab compares: runs, the tasks and the lengths that they are tested at, and how."""

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    protocol: Protocol

    def keys(self, run: Run) -> Iterator[tuple[dict[str, Any], str, int]]:
        """The store's key of every row of a run, with its task and length."""
        for name in self.tasks:
            for length in self.lengths:
                key = {
                    "kind": "lab", "run": run.to_json(), "protocol": asdict(self.protocol),
                    "task": name, "length": length,
                }  # fmt: skip
                if name == TEXT:  # excerpts are cut for the greatest length
                    key["longest"] = max(self.lengths)
                yield key, name, length


def make_plan(
    options: RunOptions,
    schemes: str,
    lengths: tuple[int, ...],
    seeds: tuple[int, ...],
    protocol: Protocol,
    corpus: Corpus,
    world: World,
) -> Plan:
    """The plan, with every mistake raised here; without lengths, from one window to sixteen."""
    lengths = lengths or tuple(options.length * 2**k for k in range(5))
    layers = SIZES[options.size].layers if options.size in SIZES else 1
    each = chosen(schemes, options.length, layers)
    runs = tuple(make_run(options, s, seed, corpus, world) for s in each for seed in seeds)
    tasks = tuple(name for name, _ in shares(options.tasks))
    if not seeds:
        raise UserError("--seeds names none: give some, as in 0,1,2.")
    if min(lengths) < 2:
        raise UserError(f"--test needs at least two tokens, but got {min(lengths)}: give more.")
    if TEXT in tasks:
        excerpts(corpus, max(lengths) + 1, protocol.excerpts, protocol.seed)
    return Plan(runs, tasks, lengths, protocol)


def compare(
    plan: Plan, corpus: Corpus, store: Store, out: Path, world: World, options: RunOptions
) -> tuple[Score, ...]:
    """Compute the rows that the store lacks; then every row of the plan, in the first process."""
    for index, run in enumerate(plan.runs):
        missing = [k for k in plan.keys(run) if store.get(k[0]) is None]
        if not world.broadcast(bool(missing)):
            continue
        name = f"{index + 1}/{len(plan.runs)} {label(run.config.scheme)}, seed {run.seed}"
        folder = lab_folder(out / slug(run))
        if not world.broadcast(folder.done):
            loop = options.loop_options(name, world)
            train_run(run, corpus, folder, world, loop, compiled=options.compile)
        if world.first:
            model = load(folder.path, device=world.device)
            evaluator = Evaluator(model, corpus, max(plan.lengths), plan.protocol, run.dtype)
            for done, (key, each, length) in enumerate(missing):
                stage = f"test {each} at {length:,}"
                options.progress(Event(stage, done, len(missing), f"{name}, test"))
                store.put(key, evaluator.score(each, length))
        world.barrier()
    return tuple(scores(plan, store)) if world.first else ()


def scores(plan: Plan, store: Store) -> Iterator[Score]:
    """The rows of a plan that the store has."""
    for run in plan.runs:
        for key, _, _ in plan.keys(run):
            if (value := store.get(key)) is not None:
                yield _score(key, value)


def recorded(store: Store) -> Iterator[Score]:
    """Every lab row that the store has, whichever run computed it."""
    return (_score(row.key, row.value) for row in store.rows(kind="lab"))


def _score(key: dict[str, Any], value: dict[str, Any]) -> Score:
    model = key["run"]["shape"]
    return read_score(
        {
            "scheme": model["scheme"],
            "label": label(model["scheme"]),
            "trained": model["length"],
            "seed": key["run"]["seed"],
            "task": key["task"],
            "length": key["length"],
            **value,
        }
    )


def label(scheme: str) -> str:
    """A short name for tables: nope without positions, else the written form, with equal
    neighbouring layers counted."""
    if scheme == "causal()":
        return "nope"
    parsed = parse(scheme)
    if isinstance(parsed, Split):
        return dump(parsed)
    layers = groupby(dump(parsed.layer(i)) for i in range(len(parsed)))
    counted = [(text, len([*same])) for text, same in layers]
    return ", ".join(f"{n} × ({text})" if n > 1 else text for text, n in counted)


def slug(run: Run) -> str:
    """A folder's name for a run: readable, and unique."""
    name = re.sub(r"[^a-z0-9]+", "-", run.config.scheme.lower()).strip("-")[:40].strip("-")
    return f"{name}-seed{run.seed}-{address(run.to_json())[:10]}"
