"""The advice of an `extend` run, for an export: the model, the target, and for each runtime the
best scheme that it can serve, with the numbers behind it.

Runtimes that were not asked about go by the one whose settings say as much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.core.store import Store
from longitude.core.validate import UserError
from longitude.eval.records import recorded

STORE, ADVICE, SUMMARY = "results.sqlite", "recommendation.json", "summary.md"
LIKE = {"gguf": "llama.cpp", "ollama": "llama.cpp", "axolotl": "transformers"}
ALIKE = "vllm"  # fixed frequencies from a checkpoint's folder: mlx, exllama, TensorRT-LLM, …


@dataclass(frozen=True)
class Advised:
    """What a run advises."""

    name: str
    revision: str | None
    target: int
    best: Mapping[str, Any]
    runtimes: Mapping[str, Mapping[str, Any]]
    summary: str

    def scheme(self, runtime: str) -> str:
        """The best scheme for a runtime; raises where none is better than none."""
        told = self._told(runtime)
        if not told.get("scheme") or told["label"] == told["numbers"]["own"]:
            raise UserError(f"the run advises no scheme for {runtime}: {told['sentence']}")
        return str(told["scheme"])

    def cost(self, runtime: str) -> str | None:
        """What is lost against the best of all methods, where this is not it."""
        told, best = self._told(runtime), self.best
        values = [one["numbers"].get("value") for one in (told, best)]
        if told["label"] == best["label"] or not all(values):
            return None
        more = values[0]["mean"] - values[1]["mean"]
        what = "loss" if best["numbers"]["measure"] != "passkey" else "share of passkeys"
        at = f"{best['numbers']['length']:,} tokens"
        return f"against {best['label']}, the best of all, its {what} at {at} is {more:+.3f}"

    def _told(self, runtime: str) -> Mapping[str, Any]:
        name = runtime if runtime in self.runtimes else LIKE.get(runtime, ALIKE)
        return self.runtimes[name]


def is_run(path: str) -> bool:
    """Whether this is the folder of a run."""
    return (Path(path) / STORE).is_file()


def advised(path: str) -> Advised:
    """The advice in the folder of a run."""
    folder = Path(path)
    with Store(folder / STORE) as store:
        subjects = {one.key.subject for one in recorded(store)}
    if len(subjects) != 1:
        raise UserError(
            f"an export is of one model, but {folder} has measurements of {len(subjects)}: export "
            f"from a run of one."
        )
    subject = subjects.pop()
    told = _read(folder / ADVICE)
    summary = folder / SUMMARY
    return Advised(
        name=subject.name,
        revision=subject.revision,
        target=int(told["best"]["numbers"]["target"]),
        best=told["best"],
        runtimes={one["what"]: one for one in told["runtimes"]},
        summary=summary.read_text(encoding="utf-8") if summary.is_file() else "",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{file} can't be read: run the same `longitude extend` again, and it is written."
        ) from None
