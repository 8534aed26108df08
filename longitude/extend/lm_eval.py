"""The patched model through lm-eval's tasks (Gao et al. 2024, EleutherAI): an extra, imported late.

It is handed the live model, so whatever scheme the model has is what is judged.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from longitude.eval.rows import Asked
from longitude.extend.measure import Bench
from longitude.extend.plan import Method
from longitude.fields import Mistake, shown
from longitude.hf.patch import patched
from longitude.record import Store

KIND = "lm-eval"


def judge(
    bench: Bench, method: Method, tasks: tuple[str, ...], store: Store, limit: int | None = None
) -> dict[str, Any]:
    """Scores by task, recorded: {task: {metric: number}}."""
    plan = bench.plan
    asked = Asked(KIND, plan.subject, method.scheme, plan.target, protocol={"limit": limit})
    key = {**asked.key, "kind": KIND, "tasks": list(tasks)}
    known = store.get(key)
    if known is not None:
        return known["scores"]
    length = plan.target if method.by_length else None
    with (
        nullcontext() if method.patch is None else patched(bench.model, method.patch, length=length)
    ):
        scores = _evaluate(bench, tasks, plan.target, limit)
    store.put(key, {"label": method.label, "scores": scores, "machine": bench.machine})
    return scores


def _evaluate(
    bench: Bench, tasks: tuple[str, ...], length: int, limit: int | None
) -> dict[str, dict[str, float]]:
    lm_eval, manager = _library(), _library("tasks")
    place = getattr(bench.tokenizer, "name_or_path", bench.plan.subject.name)
    about = {"max_seq_lengths": [length], "tokenizer": place}
    wrapped = _library("models.huggingface").HFLM(
        pretrained=bench.model,
        tokenizer=bench.tokenizer,
        max_length=length,
        batch_size=1,
        device=str(next(bench.model.parameters()).device),
    )
    known = manager.TaskManager(metadata=about)
    missing = [task for task in tasks if task not in known.all_tasks]
    if missing:
        raise Mistake(
            f"--lm-eval: lm-eval has no task called {shown(missing[0])}: see `lm-eval ls tasks`."
        )
    found = lm_eval.simple_evaluate(
        model=wrapped, tasks=list(tasks), limit=limit, metadata=about, task_manager=known
    )
    return {task: _numbers(scores) for task, scores in found["results"].items()}


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """What is a number; -1 stands for a length that was not run."""
    return {
        name: float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value != -1
    }


def _library(part: str = "") -> Any:
    try:
        return importlib.import_module(f"lm_eval.{part}" if part else "lm_eval")
    except ImportError:
        raise Mistake(
            "--lm-eval needs the lm-eval library, which is not installed: "
            "`pip install 'longitude[lm-eval]'`."
        ) from None
