"""The patched model through lm-eval's tasks (Gao et al. 2024, EleutherAI): an extra, imported late.

It is handed the live model, so whatever scheme the model has is what is judged. RULER's tasks build
their texts with a tokenizer that they load from a path, running code that lies there: they get the
one at hand, written to a folder of its own, so that only code that was trusted before can run.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError, short, shown
from longitude.eval.records import ResultKey
from longitude.extension.measure import Bench
from longitude.extension.plan import Method
from longitude.hf.patch import patched

KIND = "lm-eval"
RULER = ("ruler", "niah_")
SHORTEST = 2048  # below it some of RULER's tasks look for a text that fits for ever
COUNTED = ("sample_len",)  # what stands beside the scores and is none


def judge(
    bench: Bench, method: Method, tasks: tuple[str, ...], store: Store, limit: int | None = None
) -> dict[str, Any]:
    """Scores by task, recorded: {task: {metric: number}}."""
    plan = bench.plan
    protocol = {"limit": limit, "version": getattr(_library(), "__version__", None)}
    asked = ResultKey(KIND, plan.subject, method.scheme, plan.target, protocol=protocol)
    key = {**asked.to_json(), "kind": KIND, "tasks": list(tasks)}
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
    if length < SHORTEST and (short_of := [t for t in tasks if t.startswith(RULER)]):
        raise UserError(
            f"--lm-eval: {short_of[0]} needs at least {SHORTEST:,} tokens, but --to is {length:,}: "
            f"choose a farther target or another task."
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # lm-eval prints what it is at, and standard output is for data
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        bench.tokenizer.save_pretrained(folder)
        about = {"max_seq_lengths": [length], "tokenizer": folder}
        known = _library("tasks").TaskManager(metadata=about)
        _check(tasks, known.all_tasks)
        try:
            found = _library().simple_evaluate(
                model=_wrapped(bench, length),
                tasks=list(tasks),
                limit=limit,
                metadata=about,
                task_manager=known,
            )
        except (ImportError, OSError) as error:  # packages or datasets that are not there
            raise UserError(
                f"--lm-eval: {', '.join(tasks)} can't be run ({short(str(error), 200)}): install "
                f"or download what is missing, or name other tasks."
            ) from None
    return {task: _numbers(scores) for task, scores in found["results"].items()}


def _wrapped(bench: Bench, length: int) -> Any:
    return _library("models.huggingface").HFLM(
        pretrained=bench.model,
        tokenizer=bench.tokenizer,
        max_length=length,
        batch_size=1,
        device=str(next(bench.model.parameters()).device),
    )


def _check(tasks: tuple[str, ...], known: Any) -> None:
    for task in tasks:
        if task not in known:
            raise UserError(
                f"--lm-eval: lm-eval has no task called {shown(task)}: see `lm-eval ls tasks`."
            )


def _numbers(scores: Mapping[str, Any]) -> dict[str, float]:
    """What is a finite number; -1 stands for a length that was not run."""
    return {
        name: float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if math.isfinite(value) and value != -1 and name not in COUNTED
    }


def check() -> None:
    """Raise unless the library is there."""
    _library()


def _library(part: str = "") -> Any:
    try:
        return importlib.import_module(f"lm_eval.{part}" if part else "lm_eval")
    except ImportError:
        raise UserError(
            "--lm-eval needs the lm-eval library, which is not installed: "
            "`pip install 'longitude[lm-eval]'`."
        ) from None
