"""The advice of an earlier `longitude extend` run, where neither a scheme nor a recipe is named.

Such a run lies in runs/NAME-TARGET; what it found best for the same model and target is what is
worth training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from longitude.core.validate import UserError
from longitude.extension.plan import target_length
from longitude.hf.loading import without_weights
from longitude.runtimes.export import is_run, read_run
from longitude.runtimes.files import slug
from longitude.training.tune.options import Asked

RUNS = Path("runs")


def with_advice(asked: Asked) -> tuple[Asked, str]:
    """What is asked for, with the scheme that was advised; and a sentence where that is so."""
    if asked.scheme is not None or asked.recipe is not None:
        return asked, ""
    trained, _ = without_weights(
        asked.model, revision=asked.revision, trust_remote_code=asked.trust_remote_code
    )
    folder = RUNS / f"{slug(asked.model)}-{target_length(asked.to, trained or 1)}"
    scheme = _best(folder, asked.model) if trained and is_run(str(folder)) else None
    if scheme is None:
        return asked, ""
    return replace(asked, scheme=scheme), f"the scheme is what {folder} advises: {scheme}."


def _best(folder: Path, model: str) -> str | None:
    """What a run of this model found best, if it was better than the model as it is."""
    try:
        advice = read_run(str(folder))
    except UserError:  # it is not whole, or of several models: the recipe's own will do
        return None
    best = advice.best
    better = best.get("scheme") and best.get("label") != best["numbers"]["own"]
    return str(best["scheme"]) if better and advice.name == model else None
