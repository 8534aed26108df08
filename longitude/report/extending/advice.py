"""What is advised, in as few sentences as say it: runtimes that are told the same share one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from longitude.report.board import printable
from longitude.report.extending.section import Section

SLOT = "\0"  # where a runtime's name stands; no printable text has it


def advice(section: Section) -> Iterator[tuple[str, str]]:
    """Each recommendation: what for, and the sentence. Where nothing helps, that is said once."""
    told = section.recommendation
    best, factor = told.get("best"), told.get("factor")
    if best:
        yield printable(best["what"]), printable(best["sentence"])
    if told.get("helps", True):
        yield from _runtimes(told.get("runtimes", ()))
    if factor:
        yield printable(factor["what"]), printable(factor["sentence"])


def headline(section: Section) -> tuple[str, str]:
    """The best recommendation, and the numbers behind it."""
    best = section.recommendation.get("best") or {}
    head, _, why = printable(best.get("sentence", "")).partition(": ")
    return head, why[:1].upper() + why[1:]


def notes(section: Section) -> list[str]:
    """What the run left out, or did otherwise than asked."""
    return [printable(str(note)) for note in section.recommendation.get("notes", ())]


def searches(section: Section) -> list[tuple[str, str]]:
    """What a search found: the sentence, and the better scheme if there is one."""
    found = section.recommendation.get("search") or ()
    return [
        (_capital(printable(one["sentence"])), printable(one["scheme"]) if one["better"] else "")
        for one in found
    ]


def scores(section: Section) -> tuple[list[str], list[list[str]]] | None:
    """lm-eval's scores as a table: tasks and metrics down, methods across."""
    by_label = section.recommendation.get("lm_eval") or {}
    tasks = [(t, m) for given in by_label.values() for t, metrics in given.items() for m in metrics]
    if not tasks:
        return None
    rows = [
        [printable(f"{task}, {metric}"), *(_score(by_label[s], task, metric) for s in by_label)]
        for task, metric in dict.fromkeys(tasks)
    ]
    return ["task", *map(printable, by_label)], rows


def _score(tasks: Mapping[str, Mapping[str, float]], task: str, metric: str) -> str:
    value = tasks.get(task, {}).get(metric)
    return "" if value is None else f"{value:.4g}"


def _runtimes(given: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for one in given:
        sentence = _short(one)
        spelt = re.search(re.escape(one["what"]), sentence, re.IGNORECASE)
        name = spelt[0] if spelt else one["what"]  # as the sentence writes it
        groups.setdefault(sentence.replace(name, SLOT), []).append(name)
    for shape, names in groups.items():
        joined = _listed(names, "or" if shape.startswith("Nothing") else "and")
        what = names[0] if len(names) == 1 else "runtimes"
        yield printable(what), printable(shape.replace(SLOT, joined))


def _short(one: Mapping[str, Any]) -> str:
    """The sentence; without its numbers where they are those of the model as it is."""
    numbers = one.get("numbers") or {}
    own = numbers.get("own") is not None and numbers.get("label") == numbers.get("own")
    return one["sentence"].partition(": ")[0].rstrip(".") + "." if own else one["sentence"]


def _listed(names: Sequence[str], word: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _capital(text: str) -> str:
    """Upper case first, but for a name: a label is written as it is typed."""
    return text[:1].upper() + text[1:] if text.startswith("no ") else text
