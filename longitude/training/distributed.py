"""Process groups, and random numbers that every process can reproduce.

Under `torchrun` or `accelerate launch` every process joins a group (gloo on CPU, NCCL on CUDA) and
trains its rows of each batch. Small lab models are replicated (DDP); larger ones, and every model
that is fine-tuned, are sharded by FSDP2 (`fully_shard`, Zhao et al. 2023, arXiv:2304.11277):
weights, gradients and optimizer state alike, gathered layer by layer. With context parallelism,
groups of neighbouring processes share the tokens of their rows.

Random draws are a pure function of seed, step and purpose. So the order of the data need not be
saved, a resumed run draws what the stopped one would have drawn, and any process can build any row.
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

SHARDED_FROM = 100_000_000  # lab models with at least so many weights are sharded
SPARE = 1.1  # factor on counted bytes, for fragmentation and the workspace of kernels


def generator(seed: int, step: int = 0, purpose: str = "") -> torch.Generator:
    """Return a fresh CPU generator. Steps of one seed and purpose never share a state: torch's
    seeding keeps 32 bits, so the step is added to the hash instead of hashed with the rest."""
    start = int.from_bytes(sha256(f"{seed} {purpose}".encode()).digest()[:4], "big")
    return torch.Generator().manual_seed((start + step) % 2**32)


@dataclass(frozen=True)
class World:
    """This process's place among all processes."""

    device: torch.device
    rank: int = 0
    size: int = 1
    context: int = 1  # processes that share the tokens of a row
    group: Any = None  # the process group that shares them

    @property
    def rows(self) -> tuple[int, int]:
        """The first row of a batch that this process takes, and the stride to its next one."""
        return self.rank // self.context, self.size // self.context

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def broadcast(self, value: int) -> int:
        """Return the first process's value in every process."""
        if self.size == 1:
            return value
        shared = torch.tensor(int(value), device=self.device)
        dist.broadcast(shared, 0)
        return int(shared)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def dtype(self, name: str) -> str:
        """Return the dtype of matrix products; auto is bfloat16 on CUDA, else float32."""
        if name not in ("auto", "float32", "bfloat16"):
            raise UserError(
                f"--dtype is auto, float32 or bfloat16, but got {name!r}: use one of them."
            )
        auto = "bfloat16" if self.device.type == "cuda" else "float32"
        return auto if name == "auto" else name

    def shared_by(self, context: int, timeout: timedelta | None = None) -> World:
        """Return this World with the group of neighbours that share the tokens of its rows."""
        check_context(context, self.size)
        if context == 1:
            return self
        # `new_group` is collective: every process creates all groups
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
    """Whether this is the first process, which prints, according to torchrun's environment."""
    return int(os.environ.get("RANK", "0")) == 0


def processes() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_context(context: int, size: int) -> None:
    if context < 1 or size % context:
        raise UserError(
            f"--context-parallel {context} does not divide {size} processes: start a multiple of "
            f"it, as in torchrun --nproc-per-node {max(context, 2)} -m longitude …"
        )


def device_bytes(device: torch.device) -> int:
    """The bytes of memory that one process may use; on a CPU, its share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def fewest_ranks(
    tokens: int, needed: Callable[[int], float], size: int, device: torch.device
) -> tuple[int, str]:
    """Return the fewest processes whose memory together holds a text, and a message if one process
    is not enough. The number divides `size`; if none is enough, it is the one with the lowest need.

    Args:
        needed: the bytes that each process needs, for a number of processes.
    """
    available, sizes = device_bytes(device), [n for n in range(1, size + 1) if size % n == 0]
    needs = {n: SPARE * needed(n) for n in sizes}
    if needs[1] <= available:
        return 1, ""
    ranks = next((n for n in sizes if needs[n] <= available), min(sizes, key=lambda n: needs[n]))
    unit = "one GPU" if device.type == "cuda" else "one process"
    sentence = f"{tokens:,} tokens need about {_gib(needs[1])} GiB, {unit} has {_gib(available)}:"
    if ranks > 1:
        sentence += f" each text is split over {ranks} ranks"
    if needs[ranks] > available:
        shared = f"; each rank needs {_gib(needs[ranks])} GiB, which may exceed its memory"
        sentence += shared if ranks > 1 else " memory may run out"
        sentence += "; torchrun shares each text over several" if processes() == 1 else ""
    return ranks, sentence


def _gib(n: float) -> str:
    return f"{n / 2**30:,.0f}" if n >= 100 * 2**30 else f"{n / 2**30:.3g}"


@contextmanager
def process_group(device: str = "auto", context: int = 1) -> Iterator[World]:
    """Join the process group, if there is one, while the block runs; `context` neighbouring
    processes share the tokens of their rows."""
    rank, size = int(os.environ.get("RANK", "0")), processes()
    check_context(context, size)
    target = device_of(device)
    if target.type not in ("cpu", "cuda"):
        raise UserError(f"training runs on cpu or cuda, but got {device!r}: use one of them.")
    if target.type == "cuda":
        target = torch.device("cuda", target.index or int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(target)
    world = World(target, rank, size)
    joins = size > 1 and not dist.is_initialized()
    if joins:
        dist.init_process_group("nccl" if world.device.type == "cuda" else "gloo")
    try:
        yield world.shared_by(context)
    finally:
        if joins:
            dist.destroy_process_group()


def distribute(model: nn.Module, world: World, shard: bool = False) -> nn.Module:
    """Return the module that this process trains: the model, a DDP replica or an FSDP2 shard."""
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
    """Return a model's layers: its longest ModuleList with modules of one class."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    uniform = [modules for modules in lists if len({type(module) for module in modules}) == 1]
    return max(uniform, key=len, default=[])


def assign(x: Tensor, value: Tensor) -> None:
    """Copy a full value into a tensor; of a sharded one, into this process's shard."""
    with torch.no_grad():
        if hasattr(x, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(x.device), x.device_mesh, x.placements)  # type: ignore[arg-type]
        x.copy_(value)
