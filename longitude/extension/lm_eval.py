"""Score the patched model with lm-eval (Gao et al. 2024, EleutherAI): an extra, imported lazily.

lm-eval gets the live model, so it scores whatever scheme the model runs. RULER's tasks load a
tokenizer from a path and run the code in that folder. They get the tokenizer that is already
loaded, saved to a temporary folder, so that only code that was trusted before can run.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
from contextlib import nullcontext, redirect_stdout
from tempfile import TemporaryDirectory
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError, short, shown
from longitude.eval.records import ResultKey
from longitude.extension.measure import Evaluator
from longitude.extension.plan import Method
from longitude.hf.patch import patched

KIND = "lm-eval"
RULER = ("ruler", "niah_")
MIN_RULER_LENGTH = 2048  # below it some of RULER's tasks never find a text that fits
NOT_SCORES = ("sample_len",)


def judge(
    evaluator: Evaluator,
    method: Method,
    tasks: tuple[str, ...],
    store: Store,
    limit: int | None = None,
) -> dict[str, Any]:
    """Scores by task, from the store if recorded: {task: {metric: number}}."""
    plan = evaluator.plan
    protocol = {"limit": limit, "version": getattr(package(), "__version__", None)}
    row = ResultKey(KIND, plan.subject, method.scheme, plan.target, protocol=protocol)
    key = {**row.to_json(), "kind": KIND, "tasks": list(tasks)}
    if (recorded := store.get(key)) is not None:
        return recorded["scores"]
    model, length = evaluator.target.model, plan.target if method.by_length else None
    with nullcontext() if method.patch is None else patched(model, method.patch, length=length):
        scores = _evaluate(evaluator, tasks, plan.target, limit)
    store.put(key, {"label": method.label, "scores": scores, "machine": evaluator.machine})
    return scores


def _evaluate(
    evaluator: Evaluator, tasks: tuple[str, ...], length: int, limit: int | None
) -> dict[str, dict[str, float]]:
    if length < MIN_RULER_LENGTH and (ruler := [t for t in tasks if t.startswith(RULER)]):
        raise UserError(
            f"--lm-eval: {ruler[0]} needs at least {MIN_RULER_LENGTH:,} tokens, but --to is "
            f"{length:,}: choose a farther target or another task."
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model, tokenizer = evaluator.target.model, evaluator.target.tokenizer
    # lm-eval prints its progress, and standard output is for data
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        tokenizer.save_pretrained(folder)
        metadata = {"max_seq_lengths": [length], "tokenizer": folder}
        manager = package("tasks").TaskManager(metadata=metadata)
        for task in tasks:
            if task not in manager.all_tasks:
                raise UserError(
                    f"--lm-eval: lm-eval has no task called {shown(task)}: see `lm-eval ls tasks`."
                )
        device = str(next(model.parameters()).device)
        settings = {"max_length": length, "batch_size": 1, "device": device}
        hflm = package("models.huggingface").HFLM
        wrapped = hflm(pretrained=model, tokenizer=tokenizer, **settings)
        try:
            output = package().simple_evaluate(
                model=wrapped, tasks=[*tasks], limit=limit, metadata=metadata, task_manager=manager
            )
        except (ImportError, OSError) as error:  # missing packages or datasets
            raise UserError(
                f"--lm-eval: {', '.join(tasks)} can't be run ({short(str(error), 200)}): install "
                f"or download what is missing, or name other tasks."
            ) from None
    return {
        task: {
            name: float(value)
            for name, value in scores.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
            # -1 stands for a length that was not run
            if math.isfinite(value) and value != -1 and name not in NOT_SCORES
        }
        for task, scores in output["results"].items()
    }


def package(part: str = "") -> Any:
    """Import lm-eval or one of its modules; raise UserError if it is not installed."""
    try:
        return importlib.import_module(f"lm_eval.{part}" if part else "lm_eval")
    except ImportError:
        raise UserError(
            "--lm-eval needs the lm-eval library, which is not installed: "
            "`pip install 'longitude[lm-eval]'`."
        ) from None
