"""One model over several processes: FSDP2, which shards weights, gradients and moments alike.

Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, in its second form, `fully_shard`: each layer is
gathered when it runs and let go afterwards. `torchrun` and `accelerate launch` say by the same
variables who is who (lab/world.py); each process trains its rows of every batch.
"""

from __future__ import annotations

from torch import nn

from longitude.core.validate import UserError
from longitude.training.distributed import World


def check_rows(rows: int, world: World) -> None:
    """Raise unless a batch divides among the processes."""
    if rows % world.size:
        raise UserError(
            f"a batch of {rows} sequences does not divide among {world.size} processes: "
            f"make it a multiple of {world.size}."
        )


def shard(reader: nn.Module, world: World) -> None:
    """Shard a model in place, layer by layer; nothing where there is one process."""
    if world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for layer in layers(reader):
        fully_shard(layer, mesh=mesh)
    fully_shard(reader, mesh=mesh)


def layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: its longest list of modules of one class."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    alike = [found for found in lists if len({type(one) for one in found}) == 1]
    return max(alike, key=len, default=[])
