"""Run a small plan once undisturbed, and once killed at random moments and continued.

A process that has everything loaded forks each run, so that to begin again costs nothing, and kills
it with SIGKILL. It takes a folder for the stores and a seed, and prints the addresses of the rows
that the plan asks for in its first round, and at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from longitude.core.store import Store, address
from longitude.extension.measure import Evaluator, run_rounds, run_tasks
from longitude.extension.plan import ExtendOptions, Prepared, TargetModel, prepare

KILLS = 8
SPREAD = 2.5  # what is begun is lost: with 1 the kills would not get far into the run
SMALL = ExtendOptions(
    methods="rope(remap=rerope(128))", text=(argparse.__file__,), docs=2,
    tasks=("kept_context", "passkey"), questions=1, cost=False, device="cpu",
)  # fmt: skip


def run(prepared: Prepared, path: Path) -> None:
    """What the command does: in every round all tasks that the store lacks."""
    with Store(path) as store:
        evaluator = Evaluator(prepared.plan, prepared.target, prepared.documents)
        run_rounds(
            prepared.plan, store, "context", lambda tasks: run_tasks(evaluator, tasks, store)
        )


def forked(work: Callable[[], None]) -> int:
    """A child process that does this work and nothing else; its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def killed(child: int, after: float) -> bool:
    """Kill a child after so many seconds; whether it was still at work."""
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def ended(child: int) -> None:
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"a run ended with status {status}"


def main(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    prepared = prepare(TargetModel.load("tiny-rope", SMALL), 512, SMALL)
    plan = prepared.plan
    plan = prepared.plan = replace(plan, protocol=replace(plan.protocol, rounds=2))
    rng = random.Random(seed)
    start = time.monotonic()
    ended(forked(lambda: run(prepared, folder / "undisturbed.sqlite")))
    longest = SPREAD * (time.monotonic() - start) / KILLS
    hits = stores = 0
    while hits < KILLS:  # a run that was quick enough to end is followed by a new one
        path = folder / f"killed{stores}.sqlite"
        hit = killed(forked(lambda: run(prepared, path)), rng.uniform(0, longest))  # noqa: B023
        hits, stores = hits + hit, stores + (not hit)
    ended(forked(lambda: run(prepared, path)))
    rounds = (plan.tasks(), plan.all_tasks())
    print(json.dumps([[address(a.to_json()) for t in ts for a in plan.keys(t)] for ts in rounds]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
