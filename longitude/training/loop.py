"""The training loop of `train`, `lab` and `tune`.

AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) with a learning rate for each step. Gradients are
clipped to norm 1 and accumulated over parts of a batch; the state is saved periodically. A step is
a function of the job, the seed and the step number alone, dropout included: a resumed run
reproduces an uninterrupted one, bit for bit on CPU (on CUDA with `deterministic`). All processes
take each step together.

An experiment tracker (TensorBoard, trackio, Weights & Biases) can record a run. It is imported only
if chosen, and opened when the first step is reported, so that nothing is written or sent for a run
that fails earlier. TensorBoard and trackio keep their data on this machine.
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
SMOOTHED = 20  # the reported loss is the mean of this many steps
LOGGERS = ("tensorboard", "trackio", "wandb")
Log = Callable[[dict[str, float], int], None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of a step's batch; `total` is the summed weight of all rows of all processes."""

    tokens: Int[Tensor, "rows n"]
    targets: Int[Tensor, "rows n"]
    weights: Float[Tensor, "rows n"]
    pos: Pos  # shared by all rows, or one row of positions per row
    total: float

    def rows(self, some: slice, device: torch.device) -> Batch:
        """Return the rows of the slice `some` on a device; a range of positions stays a range."""
        tensors = [self.tokens[some], self.targets[some], self.weights[some]]
        if isinstance(self.pos, Tensor):
            tensors.append(self.pos[some] if self.pos.dim() == 2 else self.pos)
        if device.type == "cuda":
            tensors = [x.pin_memory() for x in tensors]
        tokens, targets, weights, *pos = (x.to(device, non_blocking=True) for x in tensors)
        return Batch(tokens, targets, weights, pos[0] if pos else self.pos, self.total)


@dataclass(frozen=True, eq=False)
class Job:
    """A model and everything that determines the result of training it."""

    model: nn.Module  # the saved state uses the names of its parameters
    loss: Callable[..., Tensor]  # the wrapped model: (tokens, pos, targets, weights) -> sum
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Batch]  # of each step, over all processes
    rate_at: Callable[[int], float]
    steps: int
    tokens: int  # per step, over all processes
    seed: int
    dtype: str  # of matrix products
    tokens_at_once: int | None = None  # larger batches are accumulated over parts


@dataclass(frozen=True)
class Step:
    """Progress of a run."""

    step: int  # steps taken
    steps: int
    loss: float  # mean of the last steps
    rate: float  # the learning rate of the last step
    tokens_per_second: float
    seconds: float  # since this process began training
    left: float  # estimated seconds remaining

    def event(self, job: str) -> Event:
        figures = {"loss": f"{self.loss:.3f}", "tokens/s": f"{self.tokens_per_second:,.0f}"}
        return Event("", self.step, self.steps, job, figures, self.left)


@dataclass(frozen=True)
class LoopOptions:
    """Options that change at most the last bits of the result."""

    deterministic: bool = False
    save_seconds: float = math.inf  # between two saved states
    save_steps: int = 0  # steps between two saved states; 0: by time alone
    sync_steps: int = 1  # between two agreements of the processes on whether to stop or save
    report_seconds: float = 0.0  # between two reports; each one waits for the device
    report: Callable[[Step], None] = lambda step: None  # called in the first process
    resume: str = "the same command continues"  # how to resume, for the message of Stopped


class Stopped(KeyboardInterrupt):
    """Raised when a run stops at the user's request; its state has been saved."""


def adamw(
    model: nn.Module,
    rate: float,
    decay: float = 0.0,
    decays: Callable[[str, Tensor], bool] = lambda name, p: True,
) -> torch.optim.Optimizer:
    """Return AdamW for the trainable parameters; `decay` applies to those that `decays` selects."""
    by_decay: dict[float, list[Tensor]] = {}
    for name, p in trainable_parameters(model):
        by_decay.setdefault(decay if decays(name, p) else 0.0, []).append(p)
    groups = [{"params": params, "weight_decay": value} for value, params in by_decay.items()]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def train(job: Job, folder: RunFolder, world: World, options: LoopOptions) -> tuple[Tensor, Step]:
    """Train to the last step, from the saved state if any; return all losses and the pace."""
    losses = torch.zeros(job.steps, device=world.device)
    start_step = folder.load(job.model, job.optimizer, losses)
    started = last_save = time.monotonic()
    last_report = -math.inf
    cuda = [world.device] if world.device.type == "cuda" else []

    def progress(done: int) -> Step:
        step = _progress(job, start_step, done, started, losses)
        if world.first:
            options.report(step)
        return step

    with (
        torch_settings(options.deterministic, world.device),
        torch.random.fork_rng(cuda),
        stop_requests() as stop,
    ):
        for done in range(start_step + 1, job.steps + 1):
            with folder.explain_failures(done, world):
                losses[done - 1] = take_step(job, done - 1, world)
                now = time.monotonic()
                if now - last_report >= options.report_seconds and done < job.steps:
                    progress(done)
                    last_report = now
                synced = world.size == 1 or done % options.sync_steps == 0
                flags = stop.is_set() + 2 * (now - last_save >= options.save_seconds)
                flags = world.broadcast(flags) if synced else 0
                stopping, time_due = flags & 1, flags & 2
                step_due = options.save_steps and done % options.save_steps == 0
                if stopping or ((time_due or step_due) and done < job.steps):
                    folder.save(done, job.model, job.optimizer, losses, world)
                    last_save = time.monotonic()
            if stopping:
                raise Stopped(f"stopped after step {done} of {job.steps}: {options.resume}.")
    return losses, progress(job.steps)


def take_step(job: Job, step: int, world: World) -> Tensor:
    """Take one step; return the mean loss over the batch of all processes, before the update."""
    for group in job.optimizer.param_groups:
        group["lr"] = job.rate_at(step)
    # dropout, if the model has any, is seeded by the step and differs between processes
    torch.manual_seed(generator(job.seed, step, f"dropout {world.rank}").initial_seed())
    batch = job.batch(step)
    rows, length = batch.tokens.shape
    local_rows = range(rows)[slice(world.rows[0], None, world.rows[1])]
    length = max(1, length // world.context)
    rows_at_once = max(1, job.tokens_at_once // length) if job.tokens_at_once else len(local_rows)
    loss = torch.zeros((), device=world.device)
    for start in range(0, len(local_rows), rows_at_once):
        indices = local_rows[start : start + rows_at_once]
        part = batch.rows(slice(indices[0], indices[-1] + 1, indices.step), world.device)
        with torch.autocast(world.device.type, torch.bfloat16, enabled=job.dtype == "bfloat16"):
            part_loss = job.loss(part.tokens, part.pos, part.targets, part.weights) / batch.total
        # gradients are averaged over processes, but each loss is divided by the weight of all rows
        (part_loss * world.size).backward()
        loss += part_loss.detach()
    nn.utils.clip_grad_norm_([p for _, p in trainable_parameters(job.model)], CLIP_NORM)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    return world.sum(loss)


def _progress(job: Job, first: int, done: int, began: float, losses: Tensor) -> Step:
    """Return the progress of a run; raises if the loss has diverged."""
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
    """Yield an event that the first SIGINT or SIGTERM sets; the second one acts immediately."""
    stop = threading.Event()
    in_main_thread = threading.current_thread() is threading.main_thread()

    def request(kind: int, frame: object) -> None:
        stop.set()
        signal.signal(kind, signal.SIG_DFL)

    signals = (signal.SIGINT, signal.SIGTERM) if in_main_thread else ()
    previous = {kind: signal.signal(kind, request) for kind in signals}
    try:
        yield stop
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


@contextmanager
def torch_settings(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Set torch's global switches while a run trains, and restore them afterwards."""
    previous = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    if device.type == "cuda":  # little runs on the CPU, and more threads would slow it down
        torch.set_num_threads(1)
    if deterministic:  # cuBLAS reads it at its initialisation
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous[0])
        torch.set_float32_matmul_precision(previous[1])
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
    """Yield a function that records each step; without a name it does nothing."""
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
    """Open a logger; the stack closes it."""
    if name == "tensorboard":
        writer = import_module("torch.utils.tensorboard").SummaryWriter(str(out / "tensorboard"))
        stack.callback(writer.close)

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for key, value in numbers.items():
                writer.add_scalar(key, value, step)

        return add_scalars
    module = import_module(name)
    kwargs = {"project": "longitude", "name": out.name, "config": dict(settings)}
    opened = module.init(**kwargs, **({"dir": str(out)} if name == "wandb" else {}))
    run = opened if name == "wandb" else module  # trackio logs to the run opened last
    stack.callback(run.finish)
    return lambda numbers, step: run.log(numbers, step=step)
