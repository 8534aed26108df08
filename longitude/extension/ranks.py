"""`extend` over the ranks of a process group: lengths that no single device can hold.

    torchrun --nproc-per-node 8 -m longitude extend MODEL --to 1m

Every rank loads the model and runs its own tokens of each text. The first one leads: it decides
what is measured, keeps the rows and writes the report. The others follow: they measure what it
announces, and end with its result. Announcements are JSON; nothing is pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longitude.core.client import is_url
from longitude.core.store import Row
from longitude.core.validate import UserError
from longitude.eval.documents import Document
from longitude.eval.prefill import input_device, lm_head
from longitude.eval.records import ResultKey, from_row
from longitude.eval.tasks import Value
from longitude.extension.measure import Evaluator
from longitude.extension.plan import ExtendOptions, Method, Plan, Prepared, TargetModel
from longitude.extension.result import ExtendResult
from longitude.hf.patch import check_over_ranks, patched, unpatched
from longitude.ops.shards import RankLost, answered
from longitude.training.distributed import process_group


def check_ranks(model: Any, options: ExtendOptions) -> None:
    """Raise on every rank for what only one process can do."""
    alone = {"the URL of a server": is_url(model), "--engine ray": options.engine == "ray",
             "--budget": options.budget, "--lm-eval": options.lm_eval}  # fmt: skip
    given = [name for name, value in alone.items() if value]
    if _processes() > 1 and given:
        raise UserError(
            f"{given[0]} needs one process, but torchrun has started {_processes()}: leave one of "
            f"the two out."
        )


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def rank_group(device: str) -> Iterator[Any]:
    """The group of all processes that torchrun has started; None for a single one."""
    if _processes() == 1:
        yield None
        return
    with process_group(device):
        yield dist.group.WORLD


def check_shared(prepared: Prepared, size: int) -> None:
    """Raise for a model whose texts so many ranks can't share."""
    subject, model = prepared.plan.subject, prepared.target.model
    lm_head(model)  # tried on a few tokens of one process
    with unpatched(model):
        check_over_ranks(model)
    if subject.trained < 4 * size:  # the shortest texts are half a window
        raise UserError(
            f"a window of {subject.trained} tokens is too short for {size} ranks: start "
            f"{subject.trained // 4} at most."
        )


def spread(prepared: Prepared, group: Any) -> None:
    """Run the plan over the ranks of a group."""
    check_shared(prepared, dist.get_world_size(group))
    prepared.group = group


def over(prepared: Prepared) -> str:
    """How texts are spread, for the sentence before the start."""
    size, where = prepared.options.context_parallel, "on Ray, each text over"
    if prepared.group is not None:
        size, where = dist.get_world_size(prepared.group), "over"
    each = -(-prepared.plan.target // size)
    return "" if size == 1 else f"; {where} {size} ranks, at most {each:,} tokens on each"


class RankEvaluator(Evaluator):
    """Measures together with the other ranks; the first one announces what."""

    def __init__(
        self, plan: Plan, target: TargetModel, documents: Sequence[Document], group: Any,
        held_out: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(plan, target, documents)
        self.group, self.held_out = group, held_out
        self.machine = f"{dist.get_world_size(self.group)} ranks: {self.machine}"

    @cached_property
    def workers(self) -> list[Evaluator]:
        return [self]

    def patched(self, scheme: str | None, length: int | None = None) -> AbstractContextManager[Any]:
        """The baseline, too, runs over the ranks, by our attention."""
        scheme, model = scheme or self.plan.subject.scheme, self.target.model
        return patched(model, scheme, length=length, check=False, group=self.group)

    def values(self, method: Method, keys: Sequence[ResultKey]) -> list[Value]:
        if dist.get_rank(self.group) == 0:
            about = {"method": asdict(method), "keys": [key.to_json() for key in keys]}
            announce(self.target.model, self.group, {"held_out": self.held_out, **about})
        return super().values(method, keys)

    def out_of_memory(self, length: int) -> str:
        raise RankLost(  # in the middle of a forward, in which the others wait for this one
            f"rank {dist.get_rank(self.group)} ran out of memory at {length} tokens: start more "
            f"ranks, or give a nearer --to; the run continues from its rows."
        )


def evaluator_of(prepared: Prepared, held_out: bool = False) -> Evaluator:
    """On the documents of a plan, or on those held out for a search."""
    documents = prepared.held_out if held_out else prepared.documents
    about = (prepared.plan, prepared.target, documents)
    if prepared.group is not None:
        return RankEvaluator(*about, prepared.group, held_out)
    return Evaluator(*about)


def on_every_rank(prepared: Prepared, run: Callable[[], ExtendResult]) -> ExtendResult:
    """The first rank's result of `run`, while the others measure what it announces."""
    model, group = prepared.target.model, prepared.group
    if dist.get_rank(group) == 0:
        result = run()
        rows = [(row.key.to_json(), row.value, row.made) for row in result.rows]
        rest = (result.recommendation, result.next_steps, str(result.folder))
        announce(model, group, {"result": (rows, *rest)})
        return result
    message = follow(model, group, [evaluator_of(prepared, held_out) for held_out in (False, True)])
    rows, recommendation, steps, folder = message["result"]
    steps = [(title, command) for title, command in steps]
    found = [from_row(Row(*row)) for row in rows]
    return ExtendResult(found, recommendation, steps, Path(folder))


def follow(model: Any, group: Any, evaluators: Sequence[Evaluator]) -> dict[str, Any]:
    """Measure what the first rank announces, until it announces its result."""
    while "result" not in (message := announce(model, group)):
        keys = [from_row(Row(key, {}, "")).key for key in message["keys"]]
        evaluators[message["held_out"]].values(Method(**message["method"]), keys)
    return message


def announce(model: Any, group: Any, message: dict[str, Any] | None = None) -> dict[str, Any]:
    """The first rank's message, on every rank."""
    data = torch.tensor([*json.dumps(message).encode()], dtype=torch.uint8)
    data, source = data.to(input_device(model)), dist.get_global_rank(group, 0)
    size = torch.tensor(len(data), device=data.device)
    with answered():
        dist.broadcast(size, source, group=group)
        data = data if dist.get_rank(group) == 0 else data.new_empty(int(size))
        dist.broadcast(data, source, group=group)
    return json.loads(bytes(data.tolist()))
