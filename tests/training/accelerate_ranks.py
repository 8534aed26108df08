"""A training loop by accelerate over the ranks of a group, begun by `test_accelerate.py`: its
losses beside those of one process.

Usage: python -m tests.training.accelerate_ranks FOLDER COUNT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.functional import cross_entropy

import longitude.hf as lh
from longitude import shard, shard_positions
from tests.processes import ranks

SCHEME, STEPS, N = "rope(remap=leaky_rerope(32, 4))", 4, 96


def losses(group: Any) -> list[float]:
    """The loop of docs/guides/parallel.md."""
    model, _ = lh.load("tiny-rope", device="cpu", dtype="float32", quiet=True)
    lh.apply(model, SCHEME, group=group)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    rng, found = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        text = torch.randint(3, 200, (2, N + 1), generator=rng)
        tokens, targets = (shard(x, group, order="zigzag") for x in (text[:, :-1], text[:, 1:]))
        pos = shard_positions(N, group, order="zigzag")[None]
        logits = model(tokens, position_ids=pos, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (2 * N)
        accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean over ranks
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(accelerator.reduce(loss.detach())))
    return found


def main(folder: Path, count: int) -> None:
    found = {"one": losses(None)}
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["WORLD_SIZE"] = str(count)
    with ranks(count) as group:
        rank = os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
        found["ranks"] = losses(group)
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
