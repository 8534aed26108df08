"""Chance as a pure function: what is drawn depends on the seed, the step and the purpose alone.

So nothing about the order of the data needs saving, a resumed run draws what the killed one would
have drawn, and each of several processes can make its own rows.

One process or many: who trains, on which device, and how their models stay one.

Under `torchrun` every process joins a group (gloo on CPU, NCCL on CUDA) and trains its rows of
each batch. Small models are copied to each process (DDP); those of 100M weights and more are
sharded (FSDP2), weights, gradients and optimizer alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longitude.core.validate import UserError


def generator(seed: int, step: int = 0, purpose: str = "") -> torch.Generator:
    """A fresh generator on the CPU. Steps of one seed and purpose never share a state: torch's
    own seeding keeps 32 bits, so the step is added to the hash and not hashed with the rest."""
    start = int.from_bytes(sha256(f"{seed} {purpose}".encode()).digest()[:4], "big")
    return torch.Generator().manual_seed((start + step) % 2**32)


SHARDED_FROM = 100_000_000  # weights


@dataclass(frozen=True)
class World:
    """This process among all."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def total(self, x: Tensor) -> Tensor:
        """The sum of one number over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def agree(self, said: bool) -> bool:
        """What the first process said."""
        if self.size == 1:
            return said
        word = torch.tensor(int(said), device=self.device)
        dist.broadcast(word, 0)
        return bool(word)

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """The world of this process, joined for as long as the block runs."""
    size, rank = (int(os.environ.get(name, d)) for name, d in (("WORLD_SIZE", 1), ("RANK", 0)))
    chosen = _device(device)
    if size == 1 or dist.is_initialized():
        yield World(chosen, rank, size)
        return
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(chosen, rank, size)
    finally:
        dist.destroy_process_group()


def _device(asked: str) -> torch.device:
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked
    try:
        device = torch.device(kind)
    except RuntimeError:
        raise UserError(f"no device is called {asked!r}: use auto, cpu or cuda.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"the lab trains on cpu or cuda, but got {asked!r}: use one of them.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {asked}, but torch finds no CUDA device here: use cpu.")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    return device


def spread(model: nn.Module, world: World) -> nn.Module:
    """The model that this process trains: itself, a copy that stays equal, or a shard."""
    if world.size == 1:
        return model
    if sum(p.numel() for p in model.parameters()) < SHARDED_FROM:
        from torch.nn.parallel import DistributedDataParallel

        ids = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]
    fully_shard(model, mesh=mesh)  # in place
    return model


def whole(x: Tensor) -> Tensor:
    """A tensor with its shards from every process; all of them must ask."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


def fill(x: Tensor, value: Tensor) -> None:
    """Put a whole value into a tensor, or this process's shard of it."""
    with torch.no_grad():
        if hasattr(x, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(x.device), x.device_mesh, x.placements)  # type: ignore[arg-type]
        x.copy_(value)
