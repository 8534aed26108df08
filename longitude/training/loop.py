"""The training loop of `train`, `lab` and `tune`.

AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), a learning rate for each step, gradients clipped
to norm 1 and accumulated over parts of a batch, a state saved every so often. What a step computes
follows from the job, the seed and the step alone, dropout included: a resumed run repeats one that
was never stopped, bit for bit on CPU (on CUDA with `deterministic`). Several processes take each
step together.

An experiment tracker (TensorBoard, trackio, Weights & Biases) may follow a run. It is imported when
it is chosen and opened at the first step, so that nothing is written or sent before a run is known
to be good. TensorBoard and trackio stay on this machine.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longitude.core.part import Pos
from longitude.core.progress import Event
from longitude.core.validate import UserError, shown
from longitude.training.checkpoint import RunFolder, trainable_parameters
from longitude.training.distributed import World, generator

BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
SMOOTHED = 20  # steps whose mean loss is reported
LOGGERS = ("tensorboard", "trackio", "wandb")
Log = Callable[[dict[str, float], int], None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a step's batch, and the summed weight of all rows of all processes."""

    tokens: Int[Tensor, "rows n"]
    targets: Int[Tensor, "rows n"]
    weights: Float[Tensor, "rows n"]
    pos: Pos  # of all rows alike, or for each row its own
    total: float

    def rows(self, some: slice, device: torch.device) -> Batch:
        """Some of its rows on a device; a range of positions stays a range."""
        tensors = [self.tokens[some], self.targets[some], self.weights[some]]
        if isinstance(self.pos, Tensor):
            tensors.append(self.pos[some] if self.pos.dim() == 2 else self.pos)
        if device.type == "cuda":
            tensors = [x.pin_memory() for x in tensors]
        tokens, targets, weights, *pos = (x.to(device, non_blocking=True) for x in tensors)
        return Batch(tokens, targets, weights, pos[0] if pos else self.pos, self.total)


@dataclass(frozen=True, eq=False)
class Job:
    """A model and all that decides what it learns."""

    model: nn.Module  # whose trainable parameters the state on disk names
    loss: Callable[..., Tensor]  # (tokens, pos, targets, weights) -> summed: the model, wrapped
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Batch]  # of a step, over all processes
    rate_at: Callable[[int], float]
    steps: int
    tokens: int  # of a step, over all processes
    seed: int
    dtype: str  # in which weights and activations are multiplied
    tokens_at_once: int | None = None  # more are accumulated, part by part


@dataclass(frozen=True)
class Step:
    """How far a run is."""

    step: int  # steps taken
    steps: int
    loss: float  # mean of the last steps
    rate: float  # the learning rate of the last step
    tokens_per_second: float
    seconds: float  # since this process began
    left: float  # seconds to go, estimated

    def event(self, job: str) -> Event:
        figures = {"loss": f"{self.loss:.3f}", "tokens/s": f"{self.tokens_per_second:,.0f}"}
        return Event("", self.step, self.steps, job, figures, self.left)


@dataclass(frozen=True)
class LoopOptions:
    """What changes nothing about the result but its last bits."""

    deterministic: bool = False
    save_seconds: float = math.inf  # between two states on disk
    save_steps: int = 0  # the same in steps; 0: by time alone
    sync_steps: int = 1  # several processes agree on whether to stop or save only so often
    report_seconds: float = 0.0  # between two reports, each of which waits for the device
    report: Callable[[Step], None] = lambda step: None  # in the first process
    resume: str = "the same command continues"  # what a user does after a stop


class Stopped(KeyboardInterrupt):
    """The run was asked to stop after some step, and has saved its state."""


def adamw(
    model: nn.Module,
    rate: float,
    decay: float = 0.0,
    decays: Callable[[str, Tensor], bool] = lambda name, p: True,
) -> torch.optim.Optimizer:
    """AdamW for the parameters that train; `decay` applies to those that `decays` picks."""
    by_decay: dict[float, list[Tensor]] = {}
    for name, p in trainable_parameters(model):
        by_decay.setdefault(decay if decays(name, p) else 0.0, []).append(p)
    groups = [{"params": some, "weight_decay": amount} for amount, some in by_decay.items()]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def train(job: Job, folder: RunFolder, world: World, options: LoopOptions) -> tuple[Tensor, Step]:
    """Train to the last step, from the saved state if there is one: every step's loss, the pace."""
    losses = torch.zeros(job.steps, device=world.device)
    first = folder.load(job.model, job.optimizer, losses)
    began = saved = time.monotonic()
    reported = -math.inf
    cuda = [world.device] if world.device.type == "cuda" else []

    def progress(done: int) -> Step:
        step = _progress(job, first, done, began, losses)
        if world.first:
            options.report(step)
        return step

    with (
        torch_settings(options.deterministic, world.device),
        torch.random.fork_rng(cuda),
        stop_requests() as stop,
    ):
        for done in range(first + 1, job.steps + 1):
            with folder.explain_failures(done, world):
                losses[done - 1] = take_step(job, done - 1, world)
                now = time.monotonic()
                if now - reported >= options.report_seconds and done < job.steps:
                    progress(done)
                    reported = now
                synced = world.size == 1 or done % options.sync_steps == 0
                flags = stop.is_set() + 2 * (now - saved >= options.save_seconds)
                flags = world.broadcast(flags) if synced else 0
                stopping, late = flags & 1, flags & 2
                counted = options.save_steps and done % options.save_steps == 0
                if stopping or ((late or counted) and done < job.steps):
                    folder.save(done, job.model, job.optimizer, losses, world)
                    saved = time.monotonic()
            if stopping:
                raise Stopped(f"stopped after step {done} of {job.steps}: {options.resume}.")
    return losses, progress(job.steps)


def take_step(job: Job, step: int, world: World) -> Tensor:
    """One step; the mean loss of the batch of all processes, before it."""
    for group in job.optimizer.param_groups:
        group["lr"] = job.rate_at(step)
    # dropout, where a model has it, follows from the step, and differs between processes
    torch.manual_seed(generator(job.seed, step, f"dropout {world.rank}").initial_seed())
    batch = job.batch(step)
    rows, length = batch.tokens.shape
    mine = range(rows)[slice(world.rows[0], None, world.rows[1])]
    length = max(1, length // world.context)
    most = max(1, job.tokens_at_once // length) if job.tokens_at_once else len(mine)
    loss = torch.zeros((), device=world.device)
    for at in range(0, len(mine), most):
        some = mine[at : at + most]
        part = batch.rows(slice(some[0], some[-1] + 1, some.step), world.device)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=job.dtype == "bfloat16"):
            part_loss = job.loss(part.tokens, part.pos, part.targets, part.weights) / batch.total
        # gradients are averaged over processes, but each has divided by the weight of all rows
        (part_loss * world.size).backward()
        loss += part_loss.detach()
    nn.utils.clip_grad_norm_([p for _, p in trainable_parameters(job.model)], CLIP_NORM)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return world.sum(loss)


def _progress(job: Job, first: int, done: int, began: float, losses: Tensor) -> Step:
    """How far a run is; raises if the loss has diverged."""
    seconds = max(1e-9, time.monotonic() - began)
    loss = float(losses[max(0, done - SMOOTHED) : done].mean())
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is not finite after step {done}: lower the learning rate (--rate, --lr)."
        )
    taken = done - first
    return Step(
        step=done,
        steps=job.steps,
        loss=loss,
        rate=job.rate_at(done - 1),
        tokens_per_second=taken * job.tokens / seconds,
        seconds=seconds,
        left=seconds / max(1, taken) * (job.steps - done),
    )


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """An event that is set by the first interrupt or termination; the second stops at once."""
    stop = threading.Event()
    main = threading.current_thread() is threading.main_thread()

    def request(kind: int, frame: object) -> None:
        stop.set()
        signal.signal(kind, signal.SIG_DFL)

    kinds = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {kind: signal.signal(kind, request) for kind in kinds}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def torch_settings(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Torch's global switches for as long as a run trains."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    if device.type == "cuda":  # what is left to the CPU is small, and threads would get in its way
        torch.set_num_threads(1)
    if deterministic:  # cuBLAS reads it when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.set_num_threads(threads)


def check_logger(name: str | None) -> None:
    """Raise unless a logger is known and installed."""
    if name is not None and name not in LOGGERS:
        raise UserError(f"--report-to is {', '.join(LOGGERS)}, but got {shown(name)}: use one.")
    if name is not None and find_spec(name) is None:
        raise UserError(
            f"--report-to {name} needs the package {name}: pip install {name}, or leave it out."
        )


@contextmanager
def logger(
    name: str | None, out: Path, settings: Mapping[str, Any]
) -> Iterator[Callable[[Step], None]]:
    """A function that records each step; it does nothing without a name."""
    log: Log | None = None
    with ExitStack() as stack:

        def record(step: Step) -> None:
            nonlocal log
            if name is None:
                return
            log = log or _open(name, out, settings, stack)
            figures = {"loss": step.loss, "learning_rate": step.rate}
            log({**figures, "tokens_per_second": step.tokens_per_second}, step.step)

        yield record


def _open(name: str, out: Path, settings: Mapping[str, Any], stack: ExitStack) -> Log:
    """Open a logger, to be closed by the stack."""
    if name == "tensorboard":
        writer = import_module("torch.utils.tensorboard").SummaryWriter(str(out / "tensorboard"))
        stack.callback(writer.close)

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return add_scalars
    module = import_module(name)
    about = {"project": "longitude", "name": out.name, "config": dict(settings)}
    opened = module.init(**about, **({"dir": str(out)} if name == "wandb" else {}))
    run = opened if name == "wandb" else module  # trackio logs to the run that it opened last
    stack.callback(run.finish)
    return lambda numbers, step: run.log(numbers, step=step)
