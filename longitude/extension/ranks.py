"""`extend` over the ranks of a process group: lengths that no single device can hold.

    torchrun --nproc-per-node 8 -m longitude extend MODEL --to 1m

Every rank loads the model. The fewest whose memory holds the target length share each text, by the
cost model, or as many as --context-parallel says; groups of them measure different methods side by
side. In a group every rank runs its own tokens of each text: the first one leads, the others
measure what it announces. The first rank of all decides what is measured, hands tasks to the
leaders of the groups, keeps the rows and writes the report; all ranks end with its result.
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

IDLE = timedelta(hours=12)  # that a group may wait for what others measure


def check_ranks(model: Any, options: ExtendOptions) -> None:
    """Raise on every rank for what only one process can do."""
    alone = {"the URL of a server": is_url(model), "--engine ray": options.engine == "ray",
             "--budget": options.budget, "--lm-eval": options.lm_eval}  # fmt: skip
    given = [name for name, value in alone.items() if value]
    if processes() > 1 and given:
        raise UserError(
            f"{given[0]} needs one process, but torchrun has started {processes()}: leave one of "
            f"the two out."
        )


def choose(prepared: Prepared, room: Callable[[Prepared], int]) -> None:
    """How many ranks share each text: as many as given, or the fewest that hold the target length.

    Args:
        room: how many there are on a Ray cluster, which is asked if one is too few.
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
    except UserError:  # one by one they may be able to all the same
        prepared.ranks, prepared.sharing = fewest(1)
        return None


def check_shared(target: TargetModel, size: int) -> None:
    """Raise for a model whose texts so many ranks can't share."""
    if size == 1:
        return
    subject, model = target.subject, target.model
    lm_head(model)  # tried on a few tokens of one process
    with unpatched(model):
        check_over_ranks(model)
    if subject.trained < 4 * size:  # the shortest texts are half a window
        raise UserError(
            f"a window of {subject.trained} tokens is too short for {size} ranks: start "
            f"{subject.trained // 4} at most."
        )


def spread(prepared: Prepared, world: World) -> None:
    """Run the plan over all processes, in groups that share each text; the first one's choice of
    their size goes, should memories differ."""
    ranks = prepared.ranks = world.broadcast(prepared.ranks)
    prepared.group = world.shared_by(ranks, IDLE if ranks < world.size else None).group
    prepared.leaders = dist.new_group([*range(0, world.size, ranks)], timeout=IDLE)


def over(prepared: Prepared) -> str:
    """How texts are spread, for the sentence before the start."""
    ranks, groups = prepared.ranks, processes() // prepared.ranks
    sentence = prepared.sharing or (f"every text runs over {ranks} ranks" if ranks > 1 else "")
    if ranks > 1:
        sentence += f", at most {-(-prepared.plan.target // ranks):,} tokens on each"
    if groups > 1:
        what = "groups" if ranks > 1 else "ranks"
        sentence += f"{'; ' if sentence else ''}{groups} {what} share the methods"
    return sentence


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
            f"rank {dist.get_rank(self.group)} ran out of memory at {length} tokens: give a "
            f"greater --context-parallel or a nearer --to; the run continues from its rows."
        )


def evaluator_of(prepared: Prepared, held_out: bool = False) -> Evaluator:
    """On the documents of a plan, or on those held out for a search."""
    documents = prepared.held_out if held_out else prepared.documents
    about = (prepared.plan, prepared.target, documents)
    if prepared.group is not None:
        return RankEvaluator(*about, prepared.group, held_out)
    return Evaluator(*about)


def measure(
    plan: Plan, target: TargetModel, documents: Sequence[Document], store: Store | None,
    progress: Progress, group: Any = None,
) -> list[Measurement]:  # fmt: skip
    """Measure what the store lacks of a plan, without elimination; all its rows. The ranks of a
    group all call it: the first one has the store and gets the rows."""
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
    """The first rank's result of `run`, while the others measure what it announces."""
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
    found = [from_row(Row(*row)) for row in rows]
    return ExtendResult(found, recommendation, steps, Path(folder))


def run_side_by_side(
    prepared: Prepared,
    evaluator: Evaluator,
    tasks: Sequence[Task],
    store: Store,
    progress: Progress,
) -> None:
    """Run tasks in the first rank, those of one kind at once, each by a group of ranks; on a CPU,
    whose cores they share, costs one at a time."""
    model, leaders, done = prepared.target.model, prepared.leaders, 0
    for _, same in groupby(tasks, key=lambda t: (t.measure, t.document, t.length, t.round)):
        waiting = [*same]
        alone = waiting[0].measure == COST and prepared.plan.subject.device == "cpu"
        most = 1 if alone else dist.get_world_size(leaders)
        while waiting:
            now, waiting = waiting[:most], waiting[most:]
            progress(Event(" and ".join(map(str, now)), done, len(tasks), "measure"))
            announce(model, leaders, {"tasks": [asdict(task) for task in now]})
            for key, value in _take_part(prepared, evaluator, now):
                store.put(key, value)
            done += len(now)


def _take_part(
    prepared: Prepared, evaluator: Evaluator, tasks: Sequence[Task]
) -> list[tuple[dict[str, Any], Value]]:
    """Run this leader's task of some; the rows of all of them."""
    own, leaders = dist.get_rank(prepared.leaders), prepared.leaders
    rows: list[tuple[dict[str, Any], Value]] = []
    if own < len(tasks):
        evaluator.run(tasks[own], lambda key, value: rows.append((key.to_json(), value)))
    every = [announce(prepared.target.model, leaders, rows, n) for n in range(len(tasks))]
    return [row for some in every for row in some]


def follow(model: Any, group: Any, evaluators: Sequence[Evaluator]) -> dict[str, Any]:
    """Measure what the first rank announces, until it announces its result."""
    while "result" not in (message := announce(model, group)):
        keys = [from_row(Row(key, {}, "")).key for key in message["keys"]]
        evaluators[message["held_out"]].values(Method(**message["method"]), keys)
    return message


def announce(model: Any, group: Any, message: Any = None, source: int = 0) -> Any:
    """The message of one rank, the first, on every rank of a group."""
    is_source = dist.get_rank(group) == source
    data = torch.tensor([*json.dumps(message).encode()], dtype=torch.uint8)
    data, source = data.to(input_device(model)), dist.get_global_rank(group, source)
    size = torch.tensor(len(data), device=data.device)
    with answered():
        dist.broadcast(size, source, group=group)
        data = data if is_source else data.new_empty(int(size))
        dist.broadcast(data, source, group=group)
    return json.loads(bytes(data.tolist()))
