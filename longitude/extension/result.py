"""The result of `extend`, one model's rows with a recommendation: printed, written, read back.

A run's folder holds results.sqlite (the store), rows.jsonl (exported from it), recommendation.json
(with the commands to run next), report.html, summary.md and charts/*.png.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longitude.core.scheme import Layers, Scheme
from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import Measurement, Subject, recorded
from longitude.eval.tables import in_window_cost, labels, result_tables
from longitude.extension.advice import recommend
from longitude.extension.distance_map import by_size, maps
from longitude.extension.plan import joint_digest

STORE, ROWS, ADVICE, PAGE = "results.sqlite", "rows.jsonl", "recommendation.json", "report.html"
SUMMARY, CHARTS = "summary.md", "charts"
Next = Sequence[tuple[str, str]]  # titles and commands


@dataclass(frozen=True, eq=False)
class Best:
    """The recommended method: the baseline if nothing helps. `label` and `scheme` are None if no
    method qualifies."""

    label: str | None
    scheme: Scheme | Layers | None
    sentence: str
    numbers: Mapping[str, Any]
    effective_length: int | None = None

    @property
    def in_window_cost(self) -> float | None:
        """The loss inside the trained window minus the baseline's, in nats per token."""
        return (self.numbers["in_window_cost"] or {}).get("mean")


@dataclass(frozen=True, eq=False)
class ExtendResult:
    """What was measured on one model, and the resulting recommendation."""

    rows: Sequence[Measurement]
    recommendation: Mapping[str, Any]
    next_steps: Next = ()
    folder: Path | None = None
    run: str = ""  # distinguishes several runs of one model

    @property
    def subject(self) -> Subject:
        return self.rows[0].key.subject

    @property
    def best(self) -> Best:
        best = self.recommendation["best"]
        scheme = None if best["scheme"] is None else parse(best["scheme"])
        reached = self.recommendation.get("effective_length", {}).get(best["label"])
        return Best(best["label"], scheme, best["sentence"], best["numbers"], reached)

    @cached_property
    def section(self) -> Any:
        """The section of a report that viz renders, with the distance map of each method."""
        from longitude.viz.section import section

        own, target = self.subject.scheme, max(row.key.length for row in self.rows)
        schemes = {label: text for text, label in labels(self.rows).items()}
        drawn, sized = maps(schemes, own, target), by_size(schemes, own, target)
        return section(self.rows, self.recommendation, self.next_steps, drawn, self.run, sized)

    def table(self, *, color: bool = False, width: int = 100) -> str:
        """The table of all methods, the recommendation and the next commands."""
        from longitude.viz.extend import table

        return table(self.section, color=color, width=width)

    def report(self, path: str | Path) -> Path:
        """Write a page (.html) or a summary for a model card (.md)."""
        return ExtendReport([self]).report(path)

    def to_json(self) -> dict[str, Any]:
        """The content of recommendation.json, and the folder of the run."""
        folder = {} if self.folder is None else {"folder": str(self.folder)}
        following = [{"title": title, "command": command} for title, command in self.next_steps]
        return {**folder, **self.recommendation, "next": following}

    def tables_json(self) -> dict[str, Any]:
        """The numbers of every table and the recommendation, as JSON types."""
        return {
            "name": self.subject.name,
            "run": self.run,
            "trained": self.subject.trained,
            "target": max(row.key.length for row in self.rows),
            "recommendation": dict(self.recommendation),
            "schemes": {label: scheme for scheme, label in labels(self.rows).items()},
            "boards": {
                name: [
                    {"label": label, "length": length, **asdict(cell)}
                    for (label, length), cell in table.cells.items()
                ]
                for name, table in result_tables(self.rows).items()
            },
            "in_window_cost": {s: asdict(v) for s, v in in_window_cost(self.rows).items()},
            "effective_length": self.recommendation.get("effective_length", {}),
        }

    def write(self, folder: Path, store: Store) -> None:
        from longitude.viz import extend as viz
        from longitude.viz.files import replace_file

        store.export(folder / ROWS)
        content = {k: v for k, v in self.to_json().items() if k != "folder"}
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        replace_file(folder / ADVICE, text.encode())
        with ThreadPoolExecutor(1) as pool:  # the page mostly waits for another process
            page = pool.submit(viz.write_page, [self.section], folder / PAGE)
            charts = viz.write_charts(self.section, folder / CHARTS)
            viz.write_summary([self.section], folder / SUMMARY, charts)
            page.result()


@dataclass(frozen=True, eq=False)
class ExtendReport:
    """Runs of one model or several, side by side."""

    models: Sequence[ExtendResult]

    def table(self, *, color: bool = False, width: int = 100) -> str:
        return "\n".join(model.table(color=color, width=width) for model in self.models)

    def report(self, path: str | Path) -> Path:
        """Write a page (.html) or summaries for a model card (.md)."""
        from longitude.viz import extend as viz

        path = Path(path)
        writers = {".html": viz.write_page, ".md": viz.write_summary}
        if path.suffix.lower() not in writers:
            raise UserError(f"--out {path} names no page: end it in .html or .md.")
        writers[path.suffix.lower()]([model.section for model in self.models], path)
        return path

    def to_json(self) -> dict[str, Any]:
        return {"models": [model.tables_json() for model in self.models]}


# reading runs back


def read_runs(paths: Iterable[Path]) -> list[ExtendResult]:
    """Read the runs in these folders, one result per model. Runs of one model are joined if they
    read the same documents under the same protocols, and distinguished by name otherwise."""
    groups: list[list[ExtendResult]] = []
    for run in (run for path in dict.fromkeys(paths) for run in _runs(path)):
        matching = next((group for group in groups if _comparable(group[0], run)), [])
        matching.append(run)
        groups += [matching] if len(matching) == 1 else []
    models = [group[0].subject.name for group in groups]
    joined = []
    for group in groups:
        rows, first = [row for run in group for row in run.rows], group[0]
        recommendation = first.recommendation if len(group) == 1 else {}
        if not recommendation:
            recommendation = recommend(rows, max(row.key.length for row in rows)).to_json()
        name = ", ".join(r.run for r in group) if models.count(first.subject.name) > 1 else ""
        joined.append(ExtendResult(rows, recommendation, first.next_steps, run=name))
    return joined


def _runs(folder: Path) -> list[ExtendResult]:
    """One result per model in a folder's store; with a single model, its saved recommendation."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: name what `longitude extend` wrote.")
    if not (folder / STORE).is_file():
        raise UserError(f"{folder} holds no {STORE}: name a folder that `longitude extend` wrote.")
    by_subject: dict[Subject, list[Measurement]] = {}
    with Store(folder / STORE) as store:
        for row in recorded(store):
            by_subject.setdefault(row.key.subject, []).append(row)
    if not by_subject:
        raise UserError(
            f"The store of {folder} has no rows of measurements: run `longitude extend`."
        )
    written: dict[str, Any] = {}
    if len(by_subject) == 1 and (folder / ADVICE).is_file():
        try:
            written = json.loads((folder / ADVICE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(
                f"{folder / ADVICE} is not valid JSON ({error}): delete it and it will be rebuilt."
            ) from error
    following = [(str(n["title"]), str(n["command"])) for n in written.pop("next", ())]
    runs = []
    for recorded_rows in by_subject.values():  # per metric, keep the rows of the newest protocol
        rows = [row for row in recorded_rows if _planned(row, written.get("plan"))] or recorded_rows
        newest = {r.key.measure: _protocol(r) for r in sorted(rows, key=lambda r: r.made)}
        rows = [row for row in rows if _protocol(row) == newest[row.key.measure]]
        runs.append(ExtendResult(rows, written, following, run=folder.resolve().name))
    return runs


def _planned(row: Measurement, plan: Mapping[str, Any] | None) -> bool:
    """Whether a row belongs to the run that the saved recommendation is about: other runs in the
    folder may have other texts or lengths."""
    if not plan:
        return True
    key, texts = row.key, plan["texts"]
    read = key.text is None or key.text.digest in texts
    same = key.protocol.get("texts") in (None, joint_digest(texts))
    return read and same and key.scheme in plan["schemes"] and key.length in plan["lengths"]


def _protocol(row: Measurement) -> str:
    """The protocol and seed of a row, as text. The lengths are left out, since they differ between
    methods that run once and those that run once per length."""
    protocol = {name: value for name, value in row.key.protocol.items() if name != "lengths"}
    return json.dumps([protocol, row.key.seed], sort_keys=True)


def _comparable(a: ExtendResult, b: ExtendResult) -> bool:
    """Whether the rows of two runs fit into one table: the same model and, for each metric that
    both have, the same documents and protocol."""
    if a.subject != b.subject:
        return False

    def taken(run: ExtendResult) -> dict[str, set[tuple[str, str]]]:
        by_measure: dict[str, set[tuple[str, str]]] = {}
        for row in run.rows:
            text = row.key.text.digest if row.key.text else ""
            by_measure.setdefault(row.key.measure, set()).add((_protocol(row), text))
        return by_measure

    ours, theirs = taken(a), taken(b)
    return all(ours[m] == theirs[m] for m in ours.keys() & theirs.keys())
