"""Train short, test long: every scheme is trained on the same data in the same order, then tested
at lengths that it was not trained on.

Text: the same excerpts at every length, cut at the front, so that the same last tokens are scored
with more and more context. Tasks: new problems, each as large as the length allows; an answer
counts if every byte of it is the most likely one (what greedy decoding would produce).

Each row (a scheme, a seed, a task, a length) is stored under everything that determines it: the
run, the protocol, the task and the length. A stored row is not computed again, and a model is
trained only if a row is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from longitude.core.progress import Event
from longitude.core.scheme import Split
from longitude.core.store import Store, address
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.eval.perplexity import by_position, tail, token_losses
from longitude.eval.records import TEXT, Score
from longitude.training.data import Corpus, excerpts
from longitude.training.distributed import World, generator
from longitude.training.lab.model import SIZES, Decoder, parse_schemes
from longitude.training.lab.run import (
    Run,
    lab_folder,
    load,
    loop_options,
    make_run,
    shares,
    train_run,
)
from longitude.training.lab.tasks import accuracy, task
from longitude.training.options import LabOptions

TOKENS_AT_ONCE = 2**15
SEED = 0  # of excerpts and problems


@dataclass(frozen=True)
class Plan:
    """The runs that a lab compares, and the tasks and lengths to test them at."""

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    options: LabOptions

    def keys(self, run: Run) -> Iterator[dict[str, Any]]:
        """Yield the store's key of every row of a run."""
        counts = {"excerpts": self.options.excerpts, "problems": self.options.problems}
        protocol = {**counts, "tail": None, "seed": SEED, "version": 1}
        for name in self.tasks:
            for length in self.lengths:
                key = {"kind": "lab", "run": run.to_json(), "protocol": protocol}
                key |= {"task": name, "length": length}
                # excerpts depend on the greatest length
                yield key | ({"longest": max(self.lengths)} if name == TEXT else {})


def make_plan(schemes: str, options: LabOptions, corpus: Corpus, world: World) -> Plan:
    """Make the plan; every error in the options is raised here."""
    lengths = options.test or tuple(options.length * 2**k for k in range(5))
    layers = SIZES[options.size].layers if options.size in SIZES else 1
    parsed = parse_schemes(schemes, options.length, layers)
    runs = tuple(make_run(options, s, n, corpus, world) for s in parsed for n in options.seeds)
    tasks = tuple(name for name, _ in shares(options.tasks))
    if not runs:
        raise UserError("--seeds names none: give some, as in 0,1,2.")
    if min(lengths) < 2:
        option = "--test" if options.test else "--length, the shortest length of a test,"
        raise UserError(f"{option} needs at least two tokens, but got {min(lengths)}: give more.")
    if TEXT in tasks:
        excerpts(corpus, max(lengths) + 1, options.excerpts, SEED)
    return Plan(runs, tasks, lengths, options)


def compare(plan: Plan, corpus: Corpus, store: Store, world: World) -> tuple[Score, ...]:
    """Compute the rows that the store lacks; the first process returns all rows of the plan."""
    options = plan.options
    for index, run in enumerate(plan.runs):
        missing = [key for key in plan.keys(run) if store.get(key) is None]
        if not world.broadcast(bool(missing)):
            continue
        name = f"{index + 1}/{len(plan.runs)} {label(run.config.scheme)}, seed {run.seed}"
        folder = lab_folder(Path(options.out) / slug(run))
        if not world.broadcast(folder.done):
            loop = loop_options(options, name)
            train_run(run, corpus, folder, world, loop, compiled=options.compile)
        if world.first:
            model, text = load(folder.path, device=world.device), None
            if TEXT in plan.tasks:
                text = excerpts(corpus, max(plan.lengths) + 1, options.excerpts, SEED)
            for done, key in enumerate(missing):
                stage = f"test {key['task']} at {key['length']:,}"
                options.progress(Event(stage, done, len(missing), f"{name}, test"))
                args = (key["task"], key["length"], text, options.problems, run.dtype)
                store.put(key, evaluate(model, *args))
        world.barrier()
    keys = [key for run in plan.runs for key in plan.keys(run)] if world.first else []
    return tuple(_score(key, store.get(key) or {}) for key in keys)


@torch.no_grad()
def evaluate(
    model: Decoder,
    name: str,
    length: int,
    text: Int64[Tensor, "excerpts longest"] | None,
    problems: int,
    dtype: str,
) -> dict[str, Any]:
    """Compute one row: a value, and for text its curve; or the message of its refusal."""
    window, device = model.config.length, model.tokens.weight.device

    def logits(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            return model(tokens.to(device))

    try:
        if name == TEXT:
            assert text is not None
            losses = token_losses(logits, text[:, -length - 1 :])
            if not losses.isfinite().all():
                raise UserError("its loss is not finite: lower the learning rate (--rate).")
            curve = [list(point) for point in by_position(losses)]
            value = tail(losses, min(max(1, window // 2), length))
            return {"value": value, "refused": None, "curve": curve}
        rng = generator(SEED, length, f"test {name}")
        rows = task(name, window).rows(rng, problems, length, vary=False)
        parts = rows.tokens[:, :-1].split(max(1, TOKENS_AT_ONCE // length))
        predicted = torch.cat([logits(part).argmax(-1).cpu() for part in parts])
        return {"value": accuracy(predicted, rows), "refused": None, "curve": []}
    except UserError as error:
        return {"value": None, "refused": str(error), "curve": []}


def recorded(store: Store) -> Iterator[Score]:
    """Return the scores of all lab rows in the store, whichever run computed them."""
    return (_score(row.key, row.value) for row in store.rows(kind="lab"))


def _score(key: dict[str, Any], value: dict[str, Any]) -> Score:
    model = key["run"]["shape"]
    return Score(
        scheme=model["scheme"],
        label=label(model["scheme"]),
        seed=key["run"]["seed"],
        task=key["task"],
        trained=model["length"],
        length=key["length"],
        value=value["value"],
        refused=value["refused"],
        curve=tuple((first, past, float(loss)) for first, past, loss in value["curve"]),
    )


def label(scheme: str) -> str:
    """Return a name for tables: nope, or the written form with equal consecutive layers counted."""
    if scheme == "causal()":
        return "nope"
    parsed = parse(scheme)
    if isinstance(parsed, Split):
        return dump(parsed)
    layers = groupby(map(dump, parsed.schemes))
    counted = [(text, len([*same])) for text, same in layers]
    return ", ".join(f"{n} × ({text})" if n > 1 else text for text, n in counted)


def slug(run: Run) -> str:
    """Return a folder name for a run: readable, and unique."""
    name = re.sub(r"[^a-z0-9]+", "-", run.config.scheme.lower()).strip("-")[:40].strip("-")
    return f"{name}-seed{run.seed}-{address(run.to_json())[:10]}"
