"""The training loop: AdamW, a warm-up and a cosine, clipped gradients, a state kept as it goes.

Nothing but the run decides what is computed. A resumed run repeats the steps of one that was never
stopped, bit for bit on CPU (on CUDA with `deterministic`); several processes take each step
together.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from longitude.core.validate import UserError
from longitude.training.checkpoint import Folder
from longitude.training.distributed import World, spread
from longitude.training.lab.batch import Batch, Batches
from longitude.training.lab.model import Decoder
from longitude.training.lab.run import Run
from longitude.training.lab.text import Stream

CLIP = 1.0
DECAY = 0.1  # of matrices; gains, biases and what parts learn stay free
NEWS = 0.25  # seconds between two looks at the loss, each of which waits for the device
TOGETHER = 10  # steps between two questions to the first process, where there are several


@dataclass
class Progress:
    """How far a run is: what a progress bar shows."""

    steps: int
    tokens: int  # of one step
    step: int = 0
    first: int = 0  # where this process began
    loss: float = float("nan")
    began: float = field(default_factory=time.monotonic)
    told: float = 0.0

    @property
    def seconds(self) -> float:
        """Since this process began."""
        return max(1e-9, time.monotonic() - self.began)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (self.step - self.first) * self.tokens / self.seconds

    @property
    def left(self) -> float:
        """Seconds to go."""
        done = self.step - self.first
        return self.seconds / done * (self.steps - self.step) if done else float("inf")

    def saw(
        self, step: int, losses: Tensor, watch: Callable[[Progress], None], last: bool = False
    ) -> None:
        """Tell whoever watches, seldom enough to cost nothing, and stop where the loss is lost."""
        self.step = step
        if time.monotonic() - self.told < NEWS and not last:
            return
        self.loss = float(losses[max(0, step - 20) : step].mean())
        self.told = time.monotonic()
        if not math.isfinite(self.loss):
            raise UserError(f"the loss is no number after step {step}: lower --rate.")
        watch(self)


@dataclass(frozen=True)
class Manner:
    """How to train, which changes nothing about what comes out but its last bits."""

    compile: bool = False
    deterministic: bool = False
    every: float = 60.0  # seconds between two states on disk
    watch: Callable[[Progress], None] = lambda progress: None


class Stopped(KeyboardInterrupt):
    """The run was asked to stop after some step, and has kept its state."""


def train(
    run: Run, stream: Stream | None, folder: Folder, world: World, manner: Manner | None = None
) -> tuple[Decoder, Tensor, Progress]:
    """Train, from the folder's state if it has one: the model, the loss of each step, the pace."""
    manner = manner or Manner()
    with settings(manner.deterministic, world.device):
        model = Decoder(run.shape, run.seed).to(world.device)
        if manner.compile:
            torch.compiler.reset()  # a graph that broke in another model's loop runs apart for all
            model.compile()
        ours = spread(model, world)
        optimizer = optimizer_for(model, run)
        losses = torch.zeros(run.steps, device=world.device)
        first = folder.load(model, optimizer, losses)
        progress = Progress(run.steps, run.batch * run.shape.length, first, first)
        keeper = _Keeper(manner.every, world)
        batches = Batches(run, stream, world.rank, world.size)
        with asked_to_stop() as asked:
            for step in range(first, run.steps):
                batch = batches.at(step).to(world.device)
                losses[step] = take_step(ours, optimizer, batch, run, step, world)
                progress.saw(step + 1, losses, manner.watch)
                if keeper.due(step + 1, asked.is_set()):
                    folder.save(step + 1, model, optimizer, losses, world.first)
                    if world.agree(asked.is_set()):
                        raise Stopped(step + 1)
    progress.saw(run.steps, losses, manner.watch, last=True)
    return model, losses, progress


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    run: Run,
    step: int,
    world: World,
) -> Tensor:
    """One step; the loss of the whole batch, before it."""
    for group in optimizer.param_groups:
        group["lr"] = run.rate_at(step)
    with torch.autocast(world.device.type, torch.bfloat16, enabled=run.dtype == "bfloat16"):
        loss = model(batch.tokens, batch.pos, batch.targets, batch.weights) / batch.total
    # gradients are averaged over processes, but each has divided by the weight of all their rows
    (loss * world.size).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return world.total(loss.detach())


def optimizer_for(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """AdamW that lets only the blocks' and the embedding's matrices decay."""
    named = list(model.named_parameters())
    decays = {
        name for name, p in named
        if p.dim() == 2 and ".at." not in name and not name.startswith("positions.")
    }  # fmt: skip
    groups = [
        {"params": [p for name, p in named if name in decays], "weight_decay": DECAY},
        {"params": [p for name, p in named if name not in decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.95), fused=True)


class _Keeper:
    """When to keep the state: every so many seconds, and when asked to stop. Several processes must
    do it together, so they ask the first one, and not at every step."""

    def __init__(self, every: float, world: World) -> None:
        self.every, self.world, self.last = every, world, time.monotonic()

    def due(self, step: int, asked: bool) -> bool:
        """Whether to keep the state after this step."""
        if self.world.size > 1 and step % TOGETHER:
            return False
        due = self.world.agree(asked or time.monotonic() - self.last >= self.every)
        self.last = time.monotonic() if due else self.last
        return due


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Set at the first interrupt or termination; the second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(kind) for kind in kinds]

    def ask(kind: int, frame: object) -> None:
        asked.set()
        signal.signal(kind, signal.SIG_DFL)

    for kind in kinds:
        signal.signal(kind, ask)
    try:
        yield asked
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


@contextmanager
def settings(deterministic: bool, device: torch.device) -> Iterator[None]:
    """Torch's own switches for as long as a run trains."""
    was = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
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
        torch.use_deterministic_algorithms(was[0])
        torch.set_float32_matmul_precision(was[1])
        torch.set_num_threads(threads)
