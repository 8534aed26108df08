"""`longitude.extend`: measure every candidate on a model, rank them, write the report.

    result = longitude.extend("tiny-rope", to=2048)
    result.best.scheme            # what to use
    print(result.table())         # the terminal's table
    result.report("report.html")  # the page

Rows go to results.sqlite in the run's folder: repeating a call resumes an interrupted run and
measures nothing twice. `longitude.report` joins the folders of several runs. Under torchrun the
ranks share texts or methods (ranks.py).
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from longitude.core.client import is_url
from longitude.core.progress import Event
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError, parse_seconds, shown
from longitude.eval.records import Measurement
from longitude.extension import lm_eval
from longitude.extension.advice import Recommendation, recommend
from longitude.extension.cost_model import CLAIM, OnRanks, as_json, cost_model
from longitude.extension.measure import (
    SPARE,
    TIMING,
    Clock,
    Evaluator,
    OutOfTime,
    measurements,
    missing,
    run_rounds,
    run_tasks,
    time_model,
)
from longitude.extension.plan import ExtendOptions, Prepared, TargetModel, Task, prepare
from longitude.extension.rank import CONTEXT_GOAL
from longitude.extension.ranks import (
    check_ranks,
    choose,
    evaluator_of,
    on_every_rank,
    over,
    run_side_by_side,
    spread,
)
from longitude.extension.ray import room, run_on_ray
from longitude.extension.result import STORE, Best, ExtendReport, ExtendResult, read_runs
from longitude.extension.search import search_parameters, split_documents
from longitude.options import written
from longitude.runtimes.files import slug
from longitude.runtimes.target import supporting
from longitude.serving.schemes import check_schemes
from longitude.training.distributed import process_group, processes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Best", "ExtendEstimate", "ExtendOptions", "ExtendReport", "ExtendResult", "estimate",
    "extend", "report",
]  # fmt: skip
DEFAULT_MODEL = "tiny-rope"
ENGINES = ("local", "ray")
CHOOSE_WEIGHTS = ("revision", "trust_remote_code")  # arguments of `load`
SEARCH_SHARE = 0.5  # share of a time budget that is reserved for --search


def extend(
    model: str | Path | PreTrainedModel = DEFAULT_MODEL,
    *,
    to: int | str | None = None,
    options: ExtendOptions = ExtendOptions(),  # noqa: B008 (frozen)
) -> ExtendResult:
    """Measure every candidate on the model and rank them.

    Args:
        model: a name on the Hub, a folder, a .gguf file, a bundled checkpoint, a loaded model
            (with `options.tokenizer`), or the URL of a server, whose one scheme is measured.
        to: the target length: 32768, "32k", or "4x" the trained window (the default; 8x for the
            bundled tiny-rope).
    """
    model = str(model) if isinstance(model, Path) else model
    check_ranks(model, options)
    if is_url(model):
        from longitude.probing.extend import extend_server

        return extend_server(str(model), to, options)
    began = time.monotonic()
    options.progress(Event(f"loading {model if isinstance(model, str) else 'the model'}", 0, 1))
    if processes() == 1:
        return _extended(_prepared(model, to, options), began)
    with process_group(options.device) as world:
        prepared = _prepared(model, to, options)
        spread(prepared, world)
        return on_every_rank(prepared, lambda: _extended(prepared, began))


def _extended(prepared: Prepared, began: float) -> ExtendResult:
    """Measure, rank and write the results."""
    plan, options = prepared.plan, prepared.options
    seconds = options.budget and parse_seconds(options.budget)
    folder = Path(options.out or f"runs/{slug(plan.subject.name)}-{plan.target}")
    clock = None
    if seconds:
        deadline = began + SPARE * seconds * (1 - SEARCH_SHARE * options.search)
        clock = Clock(deadline, time_model(prepared, min(3 * TIMING, seconds / 20)))
    loading = time.monotonic() - began
    with Store(writable(folder) / STORE) as store:
        tasks = plan.all_tasks()
        recorded = len(tasks) - len(missing(plan, tasks, store))
        summary = (
            f"{plan.subject.name}, trained on {plan.subject.trained:,} tokens, to "
            f"{plan.target:,}: {len(plan.methods)} methods, {len(plan.texts)} documents, into "
            f"{folder}{f'; {recorded} tasks are recorded' if recorded else ''}"
        )
        summary = "; ".join(filter(None, (summary, over(prepared))))
        options.progress(Event(summary, recorded, 0, "plan"))
        notes = _run(prepared, store, clock)
        rows = measurements(plan, store)
        if not rows:
            assert clock is not None, "without a budget every task has run"
            once, total = clock.pace.forward(plan.target), clock.pace.plan(plan)
            raise UserError(
                f"nothing could be measured within {options.budget}: loading took {loading:,.0f} "
                f"s, one forward of {plan.target:,} tokens takes about {once:.1g} s here, and the "
                f"whole run at most {total / 60:,.1f} min; give a longer --budget or a nearer --to."
            )
        recommendation = _recommend(prepared, rows)
        content = {**recommendation.to_json(), "plan": plan.to_json()}
        if options.search:
            search_clock = clock and replace(clock, deadline=began + SPARE * (seconds or 0))
            content["search"] = _search(prepared, recommendation, store, search_clock)
            if search_clock and not content["search"]:
                notes.append(f"left out to fit into {options.budget}: the search")
            elif search_clock and time.monotonic() > search_clock.deadline:
                notes.append(f"the search was cut short to fit into {options.budget}")
        content["notes"] = [*prepared.notes, *_no_better_than_chance(prepared, content), *notes]
        steps = _next_steps(prepared, recommendation, folder)
        result = ExtendResult(rows, content, steps, folder)
        result.write(folder, store)
        if options.lm_eval:  # last, since its datasets may be missing
            scores = {"lm_eval": _judge(prepared, recommendation, store)}
            result = replace(result, recommendation={**content, **scores})
            result.write(folder, store)
    return result


def report(*folders: str | Path) -> ExtendReport:
    """Compare the runs in these folders. Runs of one model share a table if they read the same
    documents under the same protocols."""
    return ExtendReport(read_runs(map(Path, folders)))


@dataclass(frozen=True)
class ExtendEstimate:
    """What a run would measure, and about how long it would take."""

    content: dict[str, Any]
    costs: Sequence[OnRanks] = ()  # by the cost model

    def table(self, *, color: bool = False, width: int = 100) -> str:
        lines = [
            f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in self.content.items()
        ]
        title = [f"memory and time of one text ({CLAIM}):"] if self.costs else []
        return "\n".join([*lines, *title, *(f"  {cost}" for cost in self.costs)])

    def to_json(self) -> dict[str, Any]:
        return {**self.content, **({"cost_model": as_json(self.costs)} if self.costs else {})}


def estimate(
    model: str | Path | PreTrainedModel = DEFAULT_MODEL,
    *,
    to: int | str | None = None,
    options: ExtendOptions = ExtendOptions(),  # noqa: B008 (frozen)
) -> ExtendEstimate:
    """Return the plan of `extend` and its estimated cost; no task runs and nothing is written."""
    model = str(model) if isinstance(model, Path) else model
    if is_url(model):
        from longitude.probing.extend import estimate_server

        return ExtendEstimate(estimate_server(str(model), to, options).to_json())
    prepared = _prepared(model, to, options)
    plan = prepared.plan
    return ExtendEstimate(
        {
            "model": plan.subject.name,
            "scheme": plan.subject.scheme,
            "trained": plan.subject.trained,
            "lengths": list(plan.lengths),
            "methods": [m.label for m in plan.methods],
            "documents": [t.name for t in plan.texts],
            "tasks": len(plan.all_tasks()),
            "seconds": round(time_model(prepared).plan(plan)),
            **({"budget": options.budget} if options.budget else {}),
            **({"ranks": sentence} if (sentence := over(prepared)) else {}),
            **({"notes": prepared.notes} if prepared.notes else {}),
        },
        cost_model(prepared.target.model, plan.lengths),
    )


def _prepared(model: Any, to: int | str | None, options: ExtendOptions) -> Prepared:
    """Plan a run. Everything that a run would refuse is raised here, before any measurement."""
    if options.budget is not None:
        parse_seconds(options.budget)
    if options.search and options.goal != CONTEXT_GOAL:
        raise UserError(
            f"--search looks for schemes that use more of --to tokens, but got --goal "
            f"{options.goal}: leave one out."
        )
    if options.lm_eval:
        lm_eval.package()
    if options.engine not in ENGINES:
        raise UserError(f"--engine is {' or '.join(ENGINES)}, but got {shown(options.engine)}.")
    if options.engine == "ray" and options.budget:
        raise UserError(
            "--budget bounds a run of this process, but got --engine ray: leave one out."
        )
    ranks = 1 if options.context_parallel is None else options.context_parallel
    single_process = processes() == 1 and options.engine != "ray"
    if ranks < 1 or (ranks > 1 and single_process):
        raise UserError(
            f"--context-parallel is how many ranks share a text, under torchrun or with --engine "
            f"ray, but got {ranks} with --engine {options.engine}: use torchrun "
            f"--nproc-per-node {max(ranks, 2)} -m longitude extend."
        )
    target = to or ("8x" if model == DEFAULT_MODEL else "4x")
    prepared = prepare(TargetModel.load(model, options), target, options)
    if options.search:
        split_documents(len(prepared.held_out), options.seed)
    choose(prepared, room)
    if prepared.ranks > 1 and options.engine == "ray" and options.search:
        raise UserError(
            "--search runs on one device, but --context-parallel is for lengths beyond it: leave "
            "one out, or search under torchrun."
        )
    return prepared


def _run(prepared: Prepared, store: Store, clock: Clock | None) -> list[str]:
    """Run every round; return notes on why it ended and on what the budget left out."""
    plan, options = prepared.plan, prepared.options
    evaluator = evaluator_of(prepared)

    def run(tasks: Sequence[Task]) -> None:
        if prepared.leaders is not None and dist.get_world_size(prepared.leaders) > 1:
            return run_side_by_side(prepared, evaluator, tasks, store, options.progress)
        if options.engine == "local":
            return run_tasks(evaluator, tasks, store, options.progress, clock)
        return run_on_ray(prepared, tasks, store, options.progress)

    by_budget = f"Ended by the budget of {options.budget}."
    try:
        ended = run_rounds(plan, store, options.goal, run, budgeted=clock is not None)
    except OutOfTime:
        ended = by_budget
    left_out = clock.notes(plan) if clock else []
    if left_out and not ended.startswith("Ended after"):  # the race was decided anyway
        ended = by_budget
    return [ended, *(f"left out to fit into {options.budget}: {note}" for note in left_out)]


def _recommend(prepared: Prepared, rows: Sequence[Measurement]) -> Recommendation:
    plan = prepared.plan
    own_scheme = parse(plan.subject.scheme)
    served = {m.label: supporting(parse(m.scheme), own_scheme) for m in plan.methods}
    config, by_plugin = prepared.target.model.config.get_text_config(), []
    for method in plan.methods:
        with suppress(UserError):  # the plugin would refuse this scheme, too
            check_schemes(config, method.scheme, plan.target)
            by_plugin.append(method.label)
    return recommend(rows, plan.target, served, prepared.options.goal, by_plugin)


def _search(
    prepared: Prepared, recommendation: Recommendation, store: Store, clock: Clock | None
) -> list[dict[str, Any]]:
    """Search the parameters around the best methods on held-out documents."""
    advice = (recommendation.best, *recommendation.runtimes)
    leaders = list(dict.fromkeys(entry.scheme for entry in advice if entry.scheme))
    evaluator = evaluator_of(prepared, held_out=True)
    return search_parameters(evaluator, leaders, store, prepared.options.progress, clock)


def _judge(prepared: Prepared, recommendation: Recommendation, store: Store) -> dict[str, Any]:
    """Return lm-eval's scores of the baseline and of the best method."""
    evaluator = Evaluator(prepared.plan, prepared.target, prepared.documents)
    best, options = recommendation.best.scheme, prepared.options
    chosen = [m for m in prepared.plan.methods if m.patch is None or m.scheme == best]
    limit = options.limit or None
    return {m.label: lm_eval.judge(evaluator, m, options.lm_eval, store, limit) for m in chosen}


def _no_better_than_chance(prepared: Prepared, advice: Mapping[str, Any]) -> list[str]:
    """A note if the baseline's loss is above that of a uniform guess: it can't read this text."""
    loss = advice["best"]["numbers"]["window"]
    vocab = prepared.target.model.config.get_text_config().vocab_size
    if loss is None or loss["mean"] <= math.log(vocab):
        return []
    return [
        f"in its window the baseline's loss is {loss['mean']:.3f} nats per token, where a blind "
        f"guess among {vocab:,} tokens has {math.log(vocab):.3f}: the model does not know this "
        f"text, so give other text with --text"
    ]


def _next_steps(
    prepared: Prepared, recommendation: Recommendation, folder: Path
) -> list[tuple[str, str]]:
    plan, options, scheme = prepared.plan, prepared.options, recommendation.best.scheme
    name = plan.subject.name
    if scheme is None:
        return []
    best = next((m for m in plan.methods if m.scheme == scheme), plan.methods[0])
    args = [f", {key}={options.loading[key]!r}" for key in CHOOSE_WEIGHTS if options.loading[key]]
    loaded = f"lh.load({json.dumps(name)}{''.join(args)})"
    python = f"import longitude.hf as lh\n\nmodel, tokenizer = {loaded}"
    if best.patch is None:
        return [("Use it in Python", python)]
    python += f'\nlh.apply(model, "{best.patch}")'
    python += f'\nlh.save(model, "out/{Path(name).stem}-long", tokenizer)'
    steps = [
        ("Use it in Python", python),
        (
            "Serve it, by each runtime's best",
            shlex.join(["longitude", "export", str(folder), "--for", "all"]),
        ),
        ("See what it does", f'longitude show "{best.scheme}"'),
    ]
    if recommendation.goal == CONTEXT_GOAL and not options.search:
        search = ["longitude", "extend", name, "--to", str(plan.target), *written(options)]
        steps.append(("Search its parameters", shlex.join([*search, "--search"])))
    return steps


def writable(folder: Path, option: str = "--out") -> Path:
    """Create the folder and return it; raise UserError if nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.part"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{option}: the folder {shown(str(folder))} can't be written "
            f"({error.strerror or error}): name another."
        ) from None
    return folder
