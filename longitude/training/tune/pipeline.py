"""`run`: a whole fine-tune, from the question to a folder that `longitude.hf.loading` opens."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longitude import __version__
from longitude.hf.patch import WINDOW, apply, undo
from longitude.hf.saving import name_target, save, save_adapter
from longitude.training.checkpoint import weights, write_json
from longitude.training.distributed import World, fill, joined
from longitude.training.loop import Progress
from longitude.training.tune.checkpointing import checkpointed
from longitude.training.tune.fsdp import shard
from longitude.training.tune.options import HISTORY, RESULT, STATE, Asked, Step, Tuned
from longitude.training.tune.params import Trained
from longitude.training.tune.prepare import Prepared, check, loaded, prepare, ready
from longitude.training.tune.recipes import LORA
from longitude.training.tune.resume import begin, claim, done, telling
from longitude.training.tune.shifted_groups import shifted
from longitude.training.tune.train import LAST, Job, train


def run(asked: Asked, tell: Callable[[Step], None] = lambda step: None) -> Tuned:
    """Train what is asked for, going on from what the folder holds; the first process tells."""
    check(asked)
    with joined(asked.device) as world:
        made, out = prepare(asked, world), Path(asked.out)
        claim(out, made.question, asked.resume)
        world.wait()  # all have looked at the folder before the first writes to it
        if world.first:
            begin(out, made.question, {"longitude": __version__, "text": made.text.name})
        if not done(out):
            _trained(made, out, world, tell if world.first else lambda step: None)
        world.wait()
        return _tuned(made, out)


def _trained(made: Prepared, out: Path, world: World, tell: Callable[[Step], None]) -> None:
    job, kept = ready(made)
    model = job.reader.model
    wanted = made.asked.checkpointing
    if world.device.type == "cuda" if wanted is None else wanted:
        checkpointed(model)
    counts = Trained(model).counts()
    shard(job.reader, world)
    job.reader.train()
    with shifted(model, made.group) if made.group else nullcontext():
        losses, pace = train(job, out, world, tell, made.asked.save_every)
    found = weights(Trained(model)) if world.size > 1 else None
    if world.first:
        with telling(out, made.recipe.steps, None):
            _keep(made, job, kept, out, found)
            write_json(out / HISTORY, _history(losses, pace, counts))
            (out / STATE).unlink(missing_ok=True)


def _history(losses: Tensor, pace: Progress, counts: dict[str, int]) -> dict[str, Any]:
    told = {"tokens_per_second": round(pace.rate, 1), "seconds": round(pace.seconds, 1)}
    return {"losses": losses.tolist(), **told, "weights": counts}


def _keep(made: Prepared, job: Job, kept: Any, out: Path, found: dict[str, Tensor] | None) -> None:
    """Write what came out, with the scheme that it reads with from now on. What was trained in
    shards is put into a model of one piece first."""
    if found is not None:
        job, kept = _whole(made, found)
    model = job.reader.model.eval()
    if made.group is not None:
        undo(model)
        apply(model, made.scheme)  # full attention from here on
    folder, asked = out / RESULT, made.asked
    if made.recipe.trained == LORA:
        more = {"revision": asked.revision, "target": made.target, "grown": made.grown}
        return save_adapter(kept, folder, asked.model, **more)
    for name in WINDOW:
        if isinstance(getattr(model.config, name, None), int):
            setattr(model.config, name, max(made.target, getattr(model.config, name)))
    save(model.to(getattr(torch, made.dtype)), folder, made.tokenizer)
    name_target(folder, made.target)


def _whole(made: Prepared, found: dict[str, Tensor]) -> tuple[Job, Any]:
    """The model once more, in one piece, with what was learned."""
    alone = World(torch.device("cpu"))
    model, _ = loaded(replace(made.asked, quiet=True), made.dtype, alone)
    made.model = model
    job, kept = ready(made)
    for name, p in Trained(job.reader.model).named_parameters():
        fill(p, found[name])
    return job, kept


def _tuned(made: Prepared, out: Path) -> Tuned:
    history = json.loads((out / HISTORY).read_text(encoding="utf-8"))
    losses = history["losses"]
    last = losses[-LAST:]
    return Tuned(
        base=made.asked.model,
        out=str(out),
        folder=str(out / RESULT),
        kind="adapter" if made.recipe.trained == LORA else "checkpoint",
        recipe=made.recipe.plain(),
        scheme=made.scheme,
        trained_to=made.about.trained,
        target=made.target,
        steps=len(losses),
        loss=sum(last) / len(last),
        tokens_per_second=history["tokens_per_second"],
        seconds=history["seconds"],
        weights=history["weights"],
        losses=tuple(losses),
    )
