"""A whole extension: prepared, cut to its budget, run, judged and written down."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from longitude.core.store import Store
from longitude.core.validate import UserError, shown
from longitude.eval.records import Measurement
from longitude.extension import budget as budgets
from longitude.extension import folder as folders
from longitude.extension import lm_eval
from longitude.extension.measure import Bench
from longitude.extension.plan import Method, Plan, Task
from longitude.extension.prepare import Options, Prepared, prepare
from longitude.extension.recommend import Recommendation, recommend
from longitude.extension.run import Watch, local, measured
from longitude.extension.search.driver import searched as search_on
from longitude.viz import extend as report

Run = Callable[[Prepared, Store, Sequence[Task], Watch], None]
ENGINES = ("local", "ray")


def engine_named(name: str) -> Run:
    """What runs the tasks: this process, or a Ray cluster."""
    if name not in ENGINES:
        raise UserError(f"--engine is {' or '.join(ENGINES)}, but got {shown(name)}.")
    if name == "ray":
        from longitude.extension.ray import on_ray

        return on_ray
    return lambda prepared, store, todo, watch: local(prepared.bench)(
        prepared.plan, todo, store, watch
    )


def ready(options: Options, budget: str | None) -> Prepared:
    """What is to be measured; cut down where there is a budget."""
    seconds = None if budget is None else budgets.seconds(budget)
    prepared = prepare(options)
    if seconds is None:
        return prepared
    pace = budgets.pace(prepared.bench)
    plan, notes = budgets.fit(prepared.plan, pace, seconds)
    told = [f"left out to fit into {budget}: {note}" for note in notes]
    told = told or [f"everything fits into {budget}: about {pace.plan(plan):,.0f} s"]
    return replanned(prepared, plan, told)


def replanned(prepared: Prepared, plan: Plan, notes: Sequence[str] = ()) -> Prepared:
    """The same model and documents under another plan."""
    old = prepared.bench
    bench = Bench(plan, old.model, old.tokenizer, old.documents[: len(plan.texts)])
    return replace(prepared, plan=plan, bench=bench, notes=[*prepared.notes, *notes])


def estimate(prepared: Prepared) -> dict[str, Any]:
    """What a plan holds and about how long it takes."""
    plan = prepared.plan
    return {
        "model": plan.subject.name,
        "trained": plan.subject.trained,
        "lengths": list(plan.lengths),
        "methods": [m.label for m in plan.methods],
        "documents": [t.name for t in plan.texts],
        "tasks": len(plan.tasks()),
        "seconds": round(budgets.pace(prepared.bench).plan(plan)),
    }


def writable(folder: Path) -> Path:
    """The folder, made; raises in a sentence where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.part"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--out {shown(str(folder))} can't be written ({error.strerror or error}): name "
            f"another folder."
        ) from None
    return folder


def advise(prepared: Prepared, store: Store) -> tuple[list[Measurement], Recommendation]:
    """The rows of the plan, and what they say."""
    found = measured(prepared.plan, store)
    return found, recommend(found, prepared.plan.target, prepared.served())


def searched(prepared: Prepared, store: Store, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The parameters around the best methods, searched on documents of their own."""
    _, advice = advise(prepared, store)
    leaders = [a.scheme for a in (advice.best, *advice.runtimes) if a.scheme]
    once = list(dict.fromkeys(leaders))
    seed = prepared.plan.seed
    return search_on(prepared.bench, prepared.apart, once, store, seed, tell)


def check_lm_eval() -> None:
    """Raise unless lm-eval is installed."""
    lm_eval.check()


def judged_by_lm_eval(
    prepared: Prepared, store: Store, tasks: str, limit: int | None
) -> dict[str, Any]:
    """lm-eval's scores of the model as it is and under the best method."""
    _, advice = advise(prepared, store)
    names = tuple(task.strip() for task in tasks.split(",") if task.strip())
    best = [m for m in prepared.plan.methods if m.patch is None or m.scheme == advice.best.scheme]
    return {m.label: lm_eval.judge(prepared.bench, m, names, store, limit) for m in best}


def written(
    prepared: Prepared, store: Store, folder: Path, extra: dict[str, Any]
) -> tuple[list[Measurement], dict[str, Any]]:
    """Everything that a run leaves in its folder; the rows and the advice."""
    found, advice = advise(prepared, store)
    plain = {**advice.plain(), **extra, "notes": prepared.notes}
    following = commands(prepared.plan, advice, folder)
    folders.write(folder, store, found, plain, following)
    return found, {**plain, "next": folders.listed(following)}


def show(found: Sequence[Measurement], advice: Mapping[str, Any], console: Console) -> None:
    """The table, the advice and what to type next, in the terminal."""
    report.show(found, advice, console)


def commands(plan: Plan, advice: Recommendation, folder: Path) -> list[tuple[str, str]]:
    """What to type next."""
    name, target = plan.subject.name, plan.target
    best = next((m for m in plan.methods if m.scheme == advice.best.scheme), plan.methods[0])
    return [("Use it in Python", _python(name, best)), *_shell(name, target, best, folder)]


def _python(name: str, best: Method) -> str:
    if best.patch is None:
        return f'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("{name}")'
    return (
        f'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("{name}")\n'
        f'lh.apply(model, "{best.patch}")\n'
        f'lh.save(model, "out/{Path(name).stem}-long", tokenizer)'
    )


def _shell(name: str, target: int, best: Method, folder: Path) -> list[tuple[str, str]]:
    found = [("Search its parameters", f"longitude extend {name} --to {target} --search")]
    if best.patch is not None:
        found.insert(0, ("See what it does", f'longitude show "{best.scheme}"'))
        serve = f"longitude export {shlex.quote(str(folder))} --for all"
        found.insert(0, ("Serve it, by each runtime's best", serve))
    return found
