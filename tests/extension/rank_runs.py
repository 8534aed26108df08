"""`extend` in one process, and over ranks that share texts or methods, begun by `test_ranks.py`.

The first run over ranks has too little memory for one of them. It loses one on its way, and is
continued from its rows.

Usage: python -m tests.extension.rank_runs FOLDER COUNT
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import longitude
import longitude.hf as lh
from longitude.core.validate import UserError
from longitude.eval.tasks import cost
from longitude.extension.api import estimate
from longitude.extension.cost_model import on_ranks
from longitude.extension.plan import ExtendOptions, TargetModel, describe
from longitude.extension.ranks import RankEvaluator, check_shared
from longitude.extension.result import ExtendResult
from longitude.training import distributed
from tests.hf.tiny import decoder
from tests.processes import ranks

LOST_AT = 4  # the announcement at which the last rank is lost
SAID: list[str] = []
OPTIONS = ExtendOptions(
    methods="rope(remap=rerope(128))", lengths=(512,),
    text=(argparse.__file__,), docs=1, questions=1, tasks=("kept_context", "passkey"),
    device="cpu", dtype="float32", progress=lambda event: SAID.append(event.stage),
)  # fmt: skip


def run(out: Path) -> dict[str, Any]:
    """The recommendation and every row, by what it is of."""
    result = longitude.extend("tiny-rope", to="2x", options=replace(OPTIONS, out=out))
    rows = {json.dumps(row.key.to_json(), sort_keys=True): dict(row.value) for row in result.rows}
    return {"best": result.best.label, "rows": rows}


def lost(folder: Path, count: int) -> None:
    """Processes of their own, of which the last one leaves; the first notes what it says then."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    values, calls = RankEvaluator.values, []

    def leaving(self: RankEvaluator, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == LOST_AT and dist.get_rank() == count - 1:
            os._exit(9)
        return values(self, *args)

    RankEvaluator.values = leaving
    with ranks(count):
        os.environ["RANK"] = str(dist.get_rank())
        try:
            run(folder / "ranks")
        except UserError as error:
            if dist.get_rank() == 0:
                (folder / "lost").write_text(str(error))
        os._exit(0)


def enough_for_two() -> int:
    """Memory that holds 512 tokens over two ranks, but not on one."""
    model, _ = lh.load("tiny-rope", device="cpu", dtype="float32")
    one, two = (on_ranks(model, 512, n).memory for n in (1, 2))
    return int(distributed.SPARE * (one + two) / 2)


def refused() -> str:
    """A model with layers that read tokens in order."""
    model = decoder("qwen3_next").eval()
    target = TargetModel(model, None, describe(model, "hybrid"))
    try:
        check_shared(target, 2)
    except UserError as error:
        return str(error)
    return ""


def main(folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    writing: list[Path] = []
    ExtendResult.write = lambda self, out, store: writing.append(out)  # type: ignore[method-assign, assignment]
    cost.ROUNDS = 1  # times are not compared
    one = run(folder / "one")
    os.environ["WORLD_SIZE"] = str(count)
    enough, memory = enough_for_two(), distributed.device_bytes
    distributed.device_bytes = lambda device: enough
    lost(folder, count)
    SAID.clear()
    writing.clear()
    dry = estimate("tiny-rope", to="2x", options=OPTIONS).to_json()
    with ranks(count):
        rank = os.environ["RANK"] = str(dist.get_rank())
        found = {"one": one, "lost": (folder / "lost").read_text(), "ranks": run(folder / "ranks")}
        found |= {"said": [*SAID], "wrote": len(writing), "refused": refused(), "dry": dry["ranks"]}
        SAID.clear()
        distributed.device_bytes = memory
        found |= {"side": run(folder / "side"), "side_said": [*SAID]}
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
