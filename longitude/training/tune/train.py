"""The loop: AdamW without decay, a warm-up, clipped gradients, a state kept every so many steps.

What a step computes follows from the recipe, the seed and the step alone, dropout included; so a
run that was killed and resumed repeats one that never was, bit for bit on CPU. Weights are held in
float32 and multiplied in bfloat16 where that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longitude.core.part import Positions
from longitude.core.validate import UserError
from longitude.training.checkpoint import Folder
from longitude.training.distributed import World, generator
from longitude.training.loop import Progress, Stopped, asked_to_stop, settings
from longitude.training.tune.data import Batch, Stream, drawn
from longitude.training.tune.loss_model import Reader
from longitude.training.tune.options import Step
from longitude.training.tune.params import Trained
from longitude.training.tune.recipes import Recipe
from longitude.training.tune.resume import telling

BETAS = (0.9, 0.95)
CLIP = 1.0
AT_ONCE = 32768  # tokens that go through a model together; the rest of a batch follows
LAST = 20  # steps whose mean loss is told
Tell = Callable[[Step], None]


@dataclass(frozen=True, eq=False)
class Job:
    """A model and all that decides what it learns."""

    reader: Reader
    recipe: Recipe
    text: Stream
    positions: Positions
    seed: int
    dtype: str  # in which weights and activations are multiplied

    @property
    def length(self) -> int:
        assert self.recipe.length is not None
        return self.recipe.length

    def batch(self, step: int) -> Batch:
        """What a step sees, over all processes."""
        return self.text.batch(self.positions, self.recipe.rows, self.length, self.seed, step)


def train(job: Job, out: Path, world: World, tell: Tell, every: int) -> tuple[Tensor, Progress]:
    """Train to the last step, from the state on disk if there is one: the losses, the pace."""
    folder, learns, steps = Folder(out), Trained(job.reader.model), job.recipe.steps
    optimizer = optimizer_for(learns, job.recipe)
    losses = torch.zeros(steps, device=world.device)
    first = folder.load(learns, optimizer, losses)
    pace = Progress(steps, job.recipe.rows * job.length, first, first)
    cuda = [world.device] if world.device.type == "cuda" else []
    with (
        settings(False, world.device),
        torch.random.fork_rng(cuda),
        asked_to_stop() as asked,
    ):
        for step in range(first, steps):
            with telling(out, step, world):
                losses[step] = take_step(job, learns, optimizer, step, world)
                stop = world.agree(asked.is_set())
                _told(pace, job.recipe, step + 1, losses, tell)
            if stop or ((step + 1) % every == 0 and step + 1 < steps):
                with telling(out, step + 1, world):
                    folder.save(step + 1, learns, optimizer, losses, world.first)
            if stop:
                raise Stopped(step + 1)
    return losses, pace


def take_step(
    job: Job, learns: Trained, optimizer: torch.optim.Optimizer, step: int, world: World
) -> Tensor:
    """One step; the mean loss of the whole batch, before it."""
    for group in optimizer.param_groups:
        group["lr"] = job.recipe.rate_at(step)
    # dropout, where a model has it, follows from the step, and differs between processes
    torch.manual_seed(generator(job.seed, step, f"dropout {world.rank}").initial_seed())
    batch = job.batch(step)
    loss = torch.zeros((), device=world.device)
    for rows in _rows(len(batch.tokens), job.length, world):
        part = batch.rows(rows, world.device)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=job.dtype == "bfloat16"):
            found = job.reader(
                part.tokens, part.pos, part.targets, part.weights, drawn(job.positions)
            )
        found = found / batch.total
        # gradients are averaged over processes, but each has divided by the weight of all rows
        (found * world.size).backward()
        loss += found.detach()
    parameters = [p for _, p in learns.named_parameters()]
    nn.utils.clip_grad_norm_(parameters, CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return world.total(loss)


def optimizer_for(learns: Trained, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW as the papers have it: no weights decay."""
    parameters = [p for _, p in learns.named_parameters()]
    return torch.optim.AdamW(parameters, lr=recipe.rate, betas=BETAS, weight_decay=0.0, fused=True)


def _rows(rows: int, length: int, world: World) -> list[slice]:
    """This process's rows of a batch, as many together as fit."""
    mine = range(world.rank, rows, world.size)
    most = max(1, AT_ONCE // length)
    return [
        slice(some[0], some[-1] + 1, world.size)
        for some in (mine[at : at + most] for at in range(0, len(mine), most))
    ]


def _told(pace: Progress, recipe: Recipe, step: int, losses: Tensor, tell: Tell) -> None:
    """Tell how far it is; stop where the loss is lost."""
    pace.step, pace.loss = step, float(losses[max(0, step - LAST) : step].mean())
    if not math.isfinite(pace.loss):
        raise UserError(f"the loss is no number after step {step}: lower the learning rate (--lr).")
    tell(Step(**_step(pace, recipe)))


def _step(pace: Progress, recipe: Recipe) -> dict[str, Any]:
    return {
        "step": pace.step,
        "steps": pace.steps,
        "loss": pace.loss,
        "rate": recipe.rate_at(pace.step - 1),
        "tokens_per_second": pace.rate,
        "seconds": pace.seconds,
        "left": pace.left,
    }
