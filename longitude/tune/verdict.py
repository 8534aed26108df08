"""What training changed, in a sentence with its numbers, and the report of before and after."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longitude.eval.rows import Measured
from longitude.eval.sheet import KINDS
from longitude.extend import folder as folders
from longitude.extend.case import Case
from longitude.extend.recommend import TOLD, story
from longitude.record import Store
from longitude.tune.asked import Tuned
from longitude.tune.exam import AFTER, BEFORE

REPORT = "report"  # the folder of a run's measurements


def verdict(found: Sequence[Measured], tuned: Tuned) -> dict[str, Any]:
    """What is told of a run, as a recommendation stands in its file."""
    case = Case(found, tuned.target)
    start = BEFORE if BEFORE in case.schemes else case.own
    numbers = case.numbers(AFTER)
    told, helps = _change(case, str(start))
    name = tuned.recipe.get("name", "training")
    sentence = f"{tuned.steps:,} steps ({name}) {told}"
    best = {"what": "tuned", "label": AFTER, "scheme": tuned.scheme}
    if numbers["value"]:
        sentence += f": {story(numbers, True)}."
    was = case.numbers(start)
    best |= {"sentence": sentence, "numbers": numbers, "before": was}
    return {"best": best, "runtimes": [], "factor": None, "helps": helps}


def _change(case: Case, start: str) -> tuple[str, bool]:
    """What training did at the target, and whether that is better beyond doubt."""
    measure, length = case.measure, case.length
    ours, theirs = case.value(measure, AFTER, length), case.value(measure, start, length)
    if ours is None or theirs is None:
        return f"have no pair of numbers at {length:,} tokens", False
    gap = case.sheets[measure].difference((AFTER, length), (start, length))
    better = (ours.mean < theirs.mean) == KINDS[measure].lower_is_better
    if ours.mean == theirs.mean or case.alike(measure, AFTER, start, length):
        word = "changed nothing that could be told"
    else:
        word = "helped" if better else "made it worse"
    by = "" if gap is None or gap.n < 2 else f" ({gap.low:+.3f} to {gap.high:+.3f})"
    moved = f"{TOLD[measure]} went from {theirs.mean:.3f} to {ours.mean:.3f}{by}"
    return f"{word}, {moved}", better and word == "helped"


def write(found: Sequence[Measured], tuned: Tuned, store: Store) -> dict[str, Any]:
    """Write the report of a run; what it says."""
    told = verdict(found, tuned)
    following = commands(tuned)
    folders.write(Path(tuned.out) / REPORT, store, found, told, following)
    return {**told, "next": folders.listed(following)}


def commands(tuned: Tuned) -> list[tuple[str, str]]:
    """What to type next."""
    folder = shlex.quote(tuned.folder)
    use = f'import longitude.hf as lh\n\nmodel, tokenizer = lh.load("{tuned.folder}")'
    return [
        ("Use it in Python", use),
        ("Serve it", f"longitude export {folder} --for transformers,vllm"),
        ("Every way beside it", f"longitude extend {folder} --to {2 * tuned.target}"),
    ]


def numbers(found: Sequence[Measured], tuned: Tuned) -> dict[str, Any]:
    """Every way's numbers at every length, for `--json`."""
    case = Case(found, tuned.target)
    return {
        label: {
            name: {
                str(n): asdict(value)
                for n in sheet.lengths
                if (value := case.value(name, label, n)) is not None
            }
            for name, sheet in case.sheets.items()
            if name in KINDS and any(s == label for s, _ in sheet.numbers)
        }
        for label in case.schemes
    }
