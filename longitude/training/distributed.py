"""One process or several, and random numbers that each of them can reproduce.

Under `torchrun` or `accelerate launch` every process joins a group (gloo on CPU, NCCL on CUDA) and
trains its rows of each batch. Small lab models are replicated (DDP); larger ones, and every model
that is fine-tuned, are sharded by FSDP2 (`fully_shard`, Zhao et al. 2023, arXiv:2304.11277):
weights, gradients and optimizer state alike, gathered layer by layer. With context parallelism some
neighbouring processes share the tokens of their rows.

Random draws are a pure function of seed, step and purpose. The order of the data needs no saving, a
resumed run draws what the stopped one would have drawn, and any process can build any row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longitude.core.validate import UserError
from longitude.hf.device import device_of

SHARDED_FROM = 100_000_000  # weights of a lab model
SPARE = 1.1  # times what is counted: gaps of the allocator, work space of kernels


def generator(seed: int, step: int = 0, purpose: str = "") -> torch.Generator:
    """A fresh generator on the CPU. Steps of one seed and purpose never share a state: torch's
    seeding keeps 32 bits, so the step is added to the hash instead of hashed with the rest."""
    start = int.from_bytes(sha256(f"{seed} {purpose}".encode()).digest()[:4], "big")
    return torch.Generator().manual_seed((start + step) % 2**32)


@dataclass(frozen=True)
class World:
    """This process among all."""

    device: torch.device
    rank: int = 0
    size: int = 1
    context: int = 1  # processes that share the tokens of a row
    group: Any = None  # those that this one shares them with

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of a batch that this process takes, and the step to its next one."""
        return self.rank // self.context, self.size // self.context

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def broadcast(self, value: int) -> int:
        """The first process's value, in every process."""
        if self.size == 1:
            return value
        shared = torch.tensor(int(value), device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def dtype(self, name: str) -> str:
        """The type in which weights and activations are multiplied; auto is bfloat16 on CUDA."""
        if name not in ("auto", "float32", "bfloat16"):
            raise UserError(
                f"--dtype is auto, float32 or bfloat16, but got {name!r}: use one of them."
            )
        auto = "bfloat16" if self.device.type == "cuda" else "float32"
        return auto if name == "auto" else name

    def shared_by(self, context: int, timeout: timedelta | None = None) -> World:
        """This process, with the neighbours that it shares the tokens of its rows with."""
        check_context(context, self.size)
        if context == 1:
            return self
        # every process makes all groups, its own among them
        neighbours = [list(range(a, a + context)) for a in range(0, self.size, context)]
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in neighbours]
        return replace(self, context=context, group=groups[self.rank // context])

    def check_batch(self, batch: int) -> None:
        if batch % self.rows[1]:
            each = f" of which {self.context} share a sequence" if self.context > 1 else ""
            raise UserError(
                f"a batch of {batch} sequences does not divide among {self.size} processes{each}: "
                f"make it a multiple of {self.rows[1]}."
            )


def is_first_process() -> bool:
    """Whether this process is the one that prints, as torchrun's environment says."""
    return int(os.environ.get("RANK", "0")) == 0


def processes() -> int:
    """How many processes torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_context(context: int, size: int) -> None:
    if context < 1 or size % context:
        raise UserError(
            f"--context-parallel {context} does not divide {size} processes: start a multiple of "
            f"it, as in torchrun --nproc-per-node {max(context, 2)} -m longitude …"
        )


def device_bytes(device: torch.device) -> int:
    """What one process may take of a device's memory; on a CPU, its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def fewest_ranks(
    tokens: int, needed: Callable[[int], float], size: int, device: torch.device
) -> tuple[int, str]:
    """The fewest processes, of a number that divides all, that hold a text together, and a sentence
    if one can't; where none do, those that come nearest.

    Args:
        needed: the bytes that each of so many takes.
    """
    has, counts = device_bytes(device), [n for n in range(1, size + 1) if size % n == 0]
    needs = {n: SPARE * needed(n) for n in counts}
    if needs[1] <= has:
        return 1, ""
    ranks = next((n for n in counts if needs[n] <= has), min(counts, key=lambda n: needs[n]))
    one = "one GPU" if device.type == "cuda" else "one process"
    sentence = f"{tokens:,} tokens need about {_gib(needs[1])} GiB, {one} has {_gib(has)}:"
    if ranks > 1:
        sentence += f" every text runs over {ranks} ranks"
    if needs[ranks] > has:
        sentence += f", and each needs {_gib(needs[ranks])}:" if ranks > 1 else ""
        sentence += " memory may run out"
        sentence += "; torchrun shares each text over several" if processes() == 1 else ""
    return ranks, sentence


def _gib(n: float) -> str:
    return f"{n / 2**30:,.0f}" if n >= 100 * 2**30 else f"{n / 2**30:.3g}"


@contextmanager
def process_group(device: str = "auto", context: int = 1) -> Iterator[World]:
    """Join the process group, if there is one, for as long as the block runs; `context` neighbours
    share the tokens of their rows."""
    rank, size = int(os.environ.get("RANK", "0")), processes()
    check_context(context, size)
    on = device_of(device)
    if on.type not in ("cpu", "cuda"):
        raise UserError(f"training runs on cpu or cuda, but got {device!r}: use one of them.")
    if on.type == "cuda":
        on = torch.device("cuda", on.index or int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(on)
    world = World(on, rank, size)
    joins = size > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if world.device.type == "cuda" else "gloo")
    try:
        yield world.shared_by(context)
    finally:
        if joins:
            dist.destroy_process_group()


def distribute(model: nn.Module, world: World, shard: bool = False) -> nn.Module:
    """The module that this process trains: the model itself, a DDP replica, or an FSDP2 shard."""
    if world.size == 1:
        return model
    if not shard and sum(p.numel() for p in model.parameters()) < SHARDED_FROM:
        from torch.nn.parallel import DistributedDataParallel

        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: its longest list of modules of one class."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    uniform = [modules for modules in lists if len({type(one) for one in modules}) == 1]
    return max(uniform, key=len, default=[])


def assign(x: Tensor, value: Tensor) -> None:
    """Copy a full value into a tensor, or this process's shard of it."""
    with torch.no_grad():
        if hasattr(x, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(x.device), x.device_mesh, x.placements)  # type: ignore[arg-type]
        x.copy_(value)
