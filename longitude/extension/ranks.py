"""`extend` over the ranks of a process group, for lengths that no single device can hold.

    torchrun --nproc-per-node 8 -m longitude extend MODEL --to 1m

Every rank loads the model. A group of ranks shares each text: as many as --context-parallel says,
or the fewest whose memory holds the target length by the cost model. Different groups measure
different methods concurrently. Within a group every rank runs its part of the tokens; the first
rank leads, and the others measure what it announces. Rank 0 decides what is measured, hands tasks
to the leaders of the groups, stores the rows and writes the report; all ranks return its result.
Announcements are JSON; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longitude.core.client import is_url
from longitude.core.progress import Event, Progress
from longitude.core.store import Row, Store
from longitude.core.validate import UserError
from longitude.eval.documents import Document
from longitude.eval.prefill import input_device, lm_head
from longitude.eval.records import COST, Measurement, ResultKey, from_row
from longitude.eval.tasks import Value
from longitude.extension.cost_model import on_ranks
from longitude.extension.measure import Evaluator, measurements, missing, run_tasks
from longitude.extension.plan import ExtendOptions, Method, Plan, Prepared, TargetModel, Task
from longitude.extension.result import ExtendResult
from longitude.hf.patch import check_over_ranks, patched, unpatched
from longitude.ops.shards import RankLost, answered
from longitude.training.distributed import World, check_context, fewest_ranks, processes

IDLE = timedelta(hours=12)  # how long a group may wait while others measure


def check_ranks(model: Any, options: ExtendOptions) -> None:
    """Raise on every rank for options that only a single process supports."""
    alone = {"the URL of a server": is_url(model), "--engine ray": options.engine == "ray",
             "--budget": options.budget, "--lm-eval": options.lm_eval}  # fmt: skip
    invalid = [name for name, value in alone.items() if value]
    if processes() > 1 and invalid:
        raise UserError(
            f"{invalid[0]} needs one process, but torchrun has started {processes()}: leave one of "
            f"the two out."
        )


def choose(prepared: Prepared, room: Callable[[Prepared], int]) -> None:
    """Set how many ranks share each text: as given, or the fewest that hold the target length.

    Args:
        room: counts the ranks that a Ray cluster has room for; called if one rank is too few.
    """
    options, model, target = prepared.options, prepared.target.model, prepared.plan.target
    if options.context_parallel is not None:
        prepared.ranks, prepared.sharing = options.context_parallel, ""
        if options.engine == "local":
            check_context(prepared.ranks, processes())
        return check_shared(prepared.target, prepared.ranks)

    def fewest(size: int) -> tuple[int, str]:
        device = input_device(model)
        return fewest_ranks(target, lambda n: on_ranks(model, target, n).memory, size, device)

    prepared.ranks, prepared.sharing = fewest(processes())
    if prepared.sharing and options.engine == "ray":
        prepared.ranks, prepared.sharing = fewest(room(prepared))
    try:
        return check_shared(prepared.target, prepared.ranks)
    except UserError:  # a single rank may still be able to
        prepared.ranks, prepared.sharing = fewest(1)
        return None


def check_shared(target: TargetModel, size: int) -> None:
    """Raise UserError if `size` ranks can't share the texts of this model."""
    if size == 1:
        return
    subject, model = target.subject, target.model
    lm_head(model)  # verified on a few tokens in one process
    with unpatched(model):
        check_over_ranks(model)
    if subject.trained < 4 * size:  # the shortest texts are half a window
        raise UserError(
            f"a window of {subject.trained} tokens is too short for {size} ranks: start "
            f"{subject.trained // 4} at most."
        )


def spread(prepared: Prepared, world: World) -> None:
    """Form groups of processes that share each text. Rank 0's choice of their size holds on all
    ranks, since their memory may differ."""
    ranks = prepared.ranks = world.broadcast(prepared.ranks)
    prepared.group = world.shared_by(ranks, IDLE if ranks < world.size else None).group
    prepared.leaders = dist.new_group([*range(0, world.size, ranks)], timeout=IDLE)


def over(prepared: Prepared) -> str:
    """How texts and methods are spread over ranks, as a phrase for the opening message."""
    ranks, groups = prepared.ranks, processes() // prepared.ranks
    sentence = prepared.sharing or (f"each text is split over {ranks} ranks" if ranks > 1 else "")
    if ranks > 1:
        sentence += f", at most {-(-prepared.plan.target // ranks):,} tokens on each"
    if groups > 1:
        what = "groups" if ranks > 1 else "ranks"
        sentence += f"{'; ' if sentence else ''}{groups} {what} share the methods"
    return sentence


class RankEvaluator(Evaluator):
    """An evaluator that measures together with the other ranks; the first one announces what."""

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
        """Patch the model over the ranks; the baseline, too, runs on our attention."""
        scheme, model = scheme or self.plan.subject.scheme, self.target.model
        return patched(model, scheme, length=length, check=False, group=self.group)

    def values(self, method: Method, keys: Sequence[ResultKey]) -> list[Value]:
        if dist.get_rank(self.group) == 0:
            request = {"method": asdict(method), "keys": [key.to_json() for key in keys]}
            announce(self.target.model, self.group, {"held_out": self.held_out, **request})
        return super().values(method, keys)

    def out_of_memory(self, length: int) -> str:
        raise RankLost(  # the other ranks wait for this one inside a forward
            f"rank {dist.get_rank(self.group)} ran out of memory at {length} tokens: give a "
            f"greater --context-parallel or a nearer --to; the run continues from its rows."
        )


def evaluator_of(prepared: Prepared, held_out: bool = False) -> Evaluator:
    """An evaluator on the documents of a plan, or on those held out for a search."""
    documents = prepared.held_out if held_out else prepared.documents
    common = (prepared.plan, prepared.target, documents)
    if prepared.group is not None:
        return RankEvaluator(*common, prepared.group, held_out)
    return Evaluator(*common)


def measure(
    plan: Plan, target: TargetModel, documents: Sequence[Document], store: Store | None,
    progress: Progress, group: Any = None,
) -> list[Measurement]:  # fmt: skip
    """Measure the rows of a plan that the store lacks, without elimination; return all its rows.
    Every rank of a group calls this: the first one passes the store and gets the rows."""
    evaluator = Evaluator(plan, target, documents)
    if group is not None:
        check_shared(target, dist.get_world_size(group))
        evaluator = RankEvaluator(plan, target, documents, group)
    if store is None:
        follow(target.model, group, [evaluator])
        return []
    run_tasks(evaluator, missing(plan, plan.all_tasks(), store), store, progress)
    if group is not None:
        announce(target.model, group, {"result": None})
    return measurements(plan, store)


def on_every_rank(prepared: Prepared, run: Callable[[], ExtendResult]) -> ExtendResult:
    """Call `run` on rank 0, while the others measure what it announces; return its result."""
    model, group, leaders = prepared.target.model, prepared.group, prepared.leaders
    evaluators = [evaluator_of(prepared, held_out) for held_out in (False, True)]
    result = None
    if dist.get_rank() == 0:
        result = run()
        rows = [(row.key.to_json(), row.value, row.made) for row in result.rows]
        rest = (result.recommendation, result.next_steps, str(result.folder))
        message = announce(model, leaders, {"result": (rows, *rest)})
    elif group is None or dist.get_rank(group) == 0:
        while "result" not in (message := announce(model, leaders)):
            tasks = [
                Task(**{**task, "method": Method(**task["method"])}) for task in message["tasks"]
            ]
            _take_part(prepared, evaluators[0], tasks)
    else:
        message = follow(model, group, evaluators)
    if group is not None and dist.get_rank(group) == 0:
        announce(model, group, message)
    if result is not None:
        return result
    rows, recommendation, steps, folder = message["result"]
    steps = [(title, command) for title, command in steps]
    measured = [from_row(Row(*row)) for row in rows]
    return ExtendResult(measured, recommendation, steps, Path(folder))


def run_side_by_side(
    prepared: Prepared,
    evaluator: Evaluator,
    tasks: Sequence[Task],
    store: Store,
    progress: Progress,
) -> None:
    """Called on rank 0: run tasks of one kind concurrently, each on one group of ranks. On a CPU,
    whose cores the groups share, cost tasks run one at a time."""
    model, leaders, done = prepared.target.model, prepared.leaders, 0
    for _, same_kind in groupby(tasks, key=lambda t: (t.measure, t.document, t.length, t.round)):
        waiting = [*same_kind]
        one_at_a_time = waiting[0].measure == COST and prepared.plan.subject.device == "cpu"
        concurrent = 1 if one_at_a_time else dist.get_world_size(leaders)
        while waiting:
            batch, waiting = waiting[:concurrent], waiting[concurrent:]
            progress(Event(" and ".join(map(str, batch)), done, len(tasks), "measure"))
            announce(model, leaders, {"tasks": [asdict(task) for task in batch]})
            for key, value in _take_part(prepared, evaluator, batch):
                store.put(key, value)
            done += len(batch)


def _take_part(
    prepared: Prepared, evaluator: Evaluator, tasks: Sequence[Task]
) -> list[tuple[dict[str, Any], Value]]:
    """Run this leader's task, if it has one; return the rows of all leaders' tasks."""
    index, leaders = dist.get_rank(prepared.leaders), prepared.leaders
    rows: list[tuple[dict[str, Any], Value]] = []
    if index < len(tasks):
        evaluator.run(tasks[index], lambda key, value: rows.append((key.to_json(), value)))
    rows_by_task = [announce(prepared.target.model, leaders, rows, n) for n in range(len(tasks))]
    return [row for task_rows in rows_by_task for row in task_rows]


def follow(model: Any, group: Any, evaluators: Sequence[Evaluator]) -> dict[str, Any]:
    """Measure what the first rank announces, until it announces its result."""
    while "result" not in (message := announce(model, group)):
        keys = [from_row(Row(key, {}, "")).key for key in message["keys"]]
        evaluators[message["held_out"]].values(Method(**message["method"]), keys)
    return message


def announce(model: Any, group: Any, message: Any = None, source: int = 0) -> Any:
    """Broadcast a message from one rank of a group, by default the first; return it on each."""
    is_source = dist.get_rank(group) == source
    data = torch.tensor([*json.dumps(message).encode()], dtype=torch.uint8)
    data, source = data.to(input_device(model)), dist.get_global_rank(group, source)
    size = torch.tensor(len(data), device=data.device)
    with answered():
        dist.broadcast(size, source, group=group)
        data = data if is_source else data.new_empty(int(size))
        dist.broadcast(data, source, group=group)
    return json.loads(bytes(data.tolist()))
