"""Processes of a gloo group, forked so that torch is imported once, and what each of them found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]


@contextmanager
def ranks(count: int) -> Iterator[Any]:
    """Become so many processes of one group, inside the block; the first outlives the others."""
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    rank, children = 0, []
    for r in range(1, count):
        child = os.fork()
        if child == 0:
            rank, children = r, []
            break
        children.append(child)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=count)
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    for child in children:
        os.waitpid(child, 0)


def run(module: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """What each rank of a program wrote into its own file of a folder."""
    command = [sys.executable, "-m", module, str(folder), str(count)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=900)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
