"""What a run leaves behind, and several runs read back as one report.

A run's folder holds results.sqlite (the store), rows.jsonl (exported from it), recommendation.json
(with what to type next), report.html, summary.md and charts/*.png.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longitude.core.store import Store
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.eval.records import Measurement, Subject, recorded
from longitude.eval.results import labels
from longitude.extension.distance_map import by_size, maps
from longitude.extension.recommend import recommend
from longitude.runtimes.support import serves
from longitude.viz import extend as report
from longitude.viz.extend_section import Section
from longitude.viz.files import replace_file

STORE, ROWS, ADVICE, PAGE = "results.sqlite", "rows.jsonl", "recommendation.json", "report.html"
SUMMARY, CHARTS = "summary.md", "charts"
Next = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Run:
    """One folder: its rows of one model, its advice, and what to type next."""

    name: str
    found: list[Measurement]
    advice: Mapping[str, Any] | None
    what_next: Next


def write(
    folder: Path,
    store: Store,
    found: Sequence[Measurement],
    recommendation: Mapping[str, Any],
    what_next: Next = (),
) -> Section:
    """Write all that a run leaves but its store, which it has; the rows in the report are `found`,
    of one model."""
    store.export(folder / ROWS)
    told = {**recommendation, "next": listed(what_next)}
    text = json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(folder / ADVICE, text.encode())
    section = _section(found, recommendation, what_next)
    drawn = report.write_charts(section, folder / CHARTS)
    report.write_summary([section], folder / SUMMARY, drawn)
    report.write_page([section], folder / PAGE)
    return section


def listed(what_next: Next) -> list[dict[str, str]]:
    """What to type next, as it stands in the file of the advice."""
    return [{"title": title, "command": command} for title, command in what_next]


def joined(paths: Sequence[Path]) -> list[Section]:
    """The runs in these folders, a section for each model; runs of one model share a section where
    they read the same documents by the same protocols, and are told apart by name otherwise."""
    groups: list[list[Run]] = []
    for run in (run for path in dict.fromkeys(paths) for run in _runs(path)):
        alike = next((group for group in groups if _alike(group[0], run)), None)
        if alike:
            alike.append(run)
        else:
            groups.append([run])
    models = [group[0].found[0].key.subject.name for group in groups]
    return [
        _joined(group, models.count(name) > 1) for group, name in zip(groups, models, strict=True)
    ]


def advised(found: Sequence[Measurement]) -> dict[str, Any]:
    """What these rows of one model advise for the greatest length among them."""
    own = parse(found[0].key.subject.scheme)
    served = {label: serves(parse(text), own) for text, label in labels(found).items()}
    return recommend(found, max(one.key.length for one in found), served).plain()


def _joined(group: list[Run], named: bool) -> Section:
    found = [one for run in group for one in run.found]
    advice = group[0].advice if len(group) == 1 else None
    name = ", ".join(run.name for run in group) if named else ""
    return _section(found, advice or advised(found), group[0].what_next, name)


def _section(
    found: Sequence[Measurement], advice: Mapping[str, Any], what_next: Next, run: str = ""
) -> Section:
    own = found[0].key.subject.scheme if found else ""
    target = max((one.key.length for one in found), default=0)
    schemes = {label: text for text, label in labels(found).items()}
    drawn, sized = maps(schemes, own, target), by_size(schemes, own, target)
    return report.section(found, advice, what_next, drawn, run, sized)


def _runs(folder: Path) -> list[Run]:
    """The models of one folder's store; the advice is of the one it was written for."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: name what `longitude extend` wrote.")
    if not (folder / STORE).is_file():
        raise UserError(f"{folder} holds no {STORE}: name a folder that `longitude extend` wrote.")
    with Store(folder / STORE) as store:
        found = [*recorded(store)]
    if not found:
        raise UserError(
            f"The store of {folder} has no rows of measurements: run `longitude extend`."
        )
    by_subject: dict[Subject, list[Measurement]] = {}
    for one in found:
        by_subject.setdefault(one.key.subject, []).append(one)
    advice = _read_advice(folder / ADVICE) if len(by_subject) == 1 else {}
    listed = advice.pop("next", ())
    what_next = [(str(n["title"]), str(n["command"])) for n in listed]
    name = folder.resolve().name
    return [Run(name, _latest(rows), advice or None, what_next) for rows in by_subject.values()]


def _read_advice(path: Path) -> dict[str, Any]:
    """What was advised, if it was written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): delete it, and it is made anew.") from error


def _latest(found: Iterable[Measurement]) -> list[Measurement]:
    """Of each measure the rows of its youngest protocol: a store may hold those of several."""
    rows = [*found]
    young = {one.key.measure: _protocol(one) for one in sorted(rows, key=lambda one: one.made)}
    return [one for one in rows if _protocol(one) == young[one.key.measure]]


def _protocol(one: Measurement) -> str:
    """How it was measured; not at which lengths, which differ between methods that are read once
    and those that are read once a length."""
    how = {name: value for name, value in one.key.protocol.items() if name != "lengths"}
    return json.dumps([how, one.key.seed], sort_keys=True)


def _alike(a: Run, b: Run) -> bool:
    """Whether the rows of two runs can stand in one table: one model, and of each measure that both
    have the same documents and protocol."""
    if a.found[0].key.subject != b.found[0].key.subject:
        return False
    ours, theirs = _taken(a.found), _taken(b.found)
    return all(ours[m] == theirs[m] for m in ours.keys() & theirs.keys())


def _taken(found: Iterable[Measurement]) -> dict[str, set[tuple[str, str]]]:
    taken: dict[str, set[tuple[str, str]]] = {}
    for one in found:
        text = one.key.text.digest if one.key.text else ""
        taken.setdefault(one.key.measure, set()).add((_protocol(one), text))
    return taken
