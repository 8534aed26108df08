"""What training changed, in a sentence with its numbers, and the report of before and after."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from longitude.core.store import Store
from longitude.eval.records import PASSKEY, Measurement
from longitude.eval.tasks import metrics
from longitude.extension.rank import Ranking, describe
from longitude.extension.result import ExtendResult
from longitude.training.tune.evaluate import AFTER, BEFORE
from longitude.training.tune.options import PICTURE, Tuned
from longitude.training.tune.recipes import OWN
from longitude.training.tune.train import LAST
from longitude.viz import extend as report
from longitude.viz.lab import write_training_loss

REPORT = "report"  # the folder of a run's measurements
HELPED = "helped"


def verdict(found: Sequence[Measurement], tuned: Tuned) -> dict[str, Any]:
    """What is told of a run, as a recommendation stands in its file."""
    case = Ranking(found, tuned.target)
    start = str(BEFORE if BEFORE in case.schemes else case.own)
    ours, was = case.numbers(AFTER), case.numbers(start)
    word = _word(case, start)
    name = tuned.recipe.get("name", OWN)
    sentence = f"{tuned.steps:,} steps of {'training' if name == OWN else name} {word}"
    if ours["value"] is not None:
        sentence += f". {describe(ours, True)}{_from(case, start)}"
    best = {"what": "tuned", "label": AFTER, "scheme": tuned.scheme, "sentence": sentence}
    best |= {"numbers": ours, "before": was}
    return {"best": best, "runtimes": [], "factor": None, "helps": word == HELPED}


def _word(case: Ranking, start: str) -> str:
    """What training did at the target, where that can be told."""
    both = [case.value(case.measure, label, case.length) for label in (AFTER, start)]
    ours, theirs = both
    if ours is None or theirs is None:
        return f"can't be judged, for one of before and after has no number at {case.length:,}"
    if case.alike(case.measure, AFTER, start, case.length):
        return "changed nothing that could be told"
    better = (ours.mean < theirs.mean) == metrics()[case.measure].lower_is_better
    return HELPED if better else "made it worse"


def _from(case: Ranking, start: str) -> str:
    """What it was before: its number with the paired difference, and its passkeys."""
    at, told = case.length, []
    was = case.value(case.measure, start, at)
    if was is not None and start != case.own:  # the own is told already
        gap = case.results[case.measure].difference((AFTER, at), (start, at))
        known = gap is not None and gap.n > 1
        paired = f" (a change of {gap.low:+.3f} to {gap.high:+.3f})" if gap and known else ""
        told.append(f"the loss was {was.mean:.3f}{paired}")
    found = case.value(PASSKEY, start, at) if case.measure != PASSKEY else None
    told += [f"it retrieved {100 * found.mean:.0f} % of passkeys"] if found else []
    return f" Before training {' and '.join(told)}." if told else ""


def write(found: Sequence[Measurement], tuned: Tuned, store: Store) -> dict[str, Any]:
    """Write the report of a run; what it says."""
    result = ExtendResult(found, verdict(found, tuned), commands(tuned))
    result.write(Path(tuned.out) / REPORT, store)
    return result.to_json()


def draw(tuned: Tuned) -> Path:
    """The loss of every step as a picture; where it lies."""
    path = Path(tuned.out) / PICTURE
    title = f"{Path(tuned.base).name} to {tuned.target:,} tokens: {tuned.scheme}"
    write_training_loss(tuned.losses, LAST, title, path)
    return path


def show(found: Sequence[Measurement], told: dict[str, Any], console: Console) -> None:
    """The table, the verdict and what to type next, in the terminal."""
    report.show(found, told, console)


def commands(tuned: Tuned) -> list[tuple[str, str]]:
    """What to type next. What has no rotation needs no export: transformers reads a checkpoint as
    it is, and an adapter once it is merged."""
    folder = shlex.quote(tuned.folder)
    use = f'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("{tuned.folder}")'
    found = [("Use it in Python", use)]
    if tuned.recipe.get("family") == "rope":
        found.append(("Serve it", f"longitude export {folder} --for transformers,vllm"))
    elif tuned.kind == "adapter":
        found.append(("Merge it", f'{use}\nlh.save(model, "{tuned.folder}-merged", tokenizer)'))
    return [*found, ("Every way beside it", f"longitude extend {folder} --to {2 * tuned.target}")]


def numbers(found: Sequence[Measurement], tuned: Tuned) -> dict[str, Any]:
    """Every way's numbers at every length, for `--json`."""
    case = Ranking(found, tuned.target)
    return {
        label: {
            name: {
                str(n): asdict(value)
                for n in sheet.lengths
                if (value := case.value(name, label, n)) is not None
            }
            for name, sheet in case.results.items()
            if name in metrics() and any(s == label for s, _ in sheet.numbers)
        }
        for label in case.schemes
    }
