"""What is advised, in as few sentences as say it: runtimes that are told the same share one.

What `longitude extend` found, as a section of a model card.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from longitude.eval.tables import ResultTable
from longitude.viz.extend_section import BEST, NEAR, NOT_ASKED, TIED, Section, Shown
from longitude.viz.text import escaped, fenced, markdown_table, printable

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
    head, _, why = printable(best.get("sentence", "")).partition(". ")
    return head, why


def notes(section: Section) -> list[str]:
    """What the run left out, or did otherwise than asked."""
    return [printable(str(note)) for note in section.recommendation.get("notes", ())]


def forgotten(section: Section) -> list[str]:
    """Which methods forget: never recommended for a longer context."""
    named = ", ".join(section.forgets)
    return [f"{named}: forgets (hides everything beyond its window)"] if named else []


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
    """The sentence; without its numbers where they are those of the baseline."""
    numbers = one.get("numbers") or {}
    own = numbers.get("own") is not None and numbers.get("label") == numbers.get("own")
    return one["sentence"].partition(". ")[0].rstrip(".") + "." if own else one["sentence"]


def _listed(names: Sequence[str], word: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"


def _capital(text: str) -> str:
    """Upper case first, but for a name: a label is written as it is typed."""
    return text[:1].upper() + text[1:] if text.startswith("no ") else text


def markdown(section: Section, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """A section of a model card; `pictures` are titles and files."""
    subject = section.subject
    head = f"## {escaped(section.title)} at {section.target:,} tokens\n"
    facts = f"Trained on {subject.trained:,} tokens; its own scheme is {fenced(subject.scheme)}.\n"
    said = "".join(f"- **{escaped(what)}**: {escaped(told)}\n" for what, told in advice(section))
    boards = [
        _by_length(section, board)
        for name, board in section.boards.items()
        if name in ("context", "passkey")
    ]
    refused = "".join(
        f"- {escaped(why)}\n" for why in [*section.refusals(), *forgotten(section), *notes(section)]
    )
    drawn = "".join(f"![{escaped(title)}]({file})\n" for title, file in pictures)
    ran = "".join(f"- {escaped(line)}\n" for line in section.machines())
    machine = f"Measured on:\n\n{ran}" if ran else ""
    parts = [head, facts, said, _methods(section), refused, *boards, *_more(section), drawn]
    return "\n".join(filter(None, [*parts, machine]))


def _more(section: Section) -> Iterator[str]:
    """What a search found, and lm-eval's scores."""
    found = searches(section)
    if found:
        lines = (f"- {escaped(told)}{f' {fenced(text)}' if text else ''}\n" for told, text in found)
        yield f"Search:\n\n{''.join(lines)}"
    judged = scores(section)
    if judged:
        (first, *labels), rows = judged
        table = markdown_table(
            [first, *map(fenced, labels)], [[escaped(r[0]), *r[1:]] for r in rows]
        )
        yield f"lm-eval:\n\n{table}"


def _methods(section: Section) -> str:
    columns = section.columns()
    heads = ["method", *(f"{c.title} ({c.unit})" for c in columns), "scheme"]
    rows = [
        [fenced(s), *(_cell(section.shown(s, c.name)) for c in columns), fenced(section.schemes[s])]
        for s in section.ranked
    ]
    note = (
        f"**Bold**: the best; {NEAR}: not significantly different from it; ± and ranges are 95 % "
        f"intervals."
    )
    more = f" {NOT_ASKED}" if section.any_assumed else ""
    return markdown_table(heads, rows) + f"\n{note}{more}\n"


def _by_length(section: Section, board: ResultTable) -> str:
    heads = [f"{n:,}{' (trained)' if n == board.trained else ''}" for n in board.lengths]
    rows = [
        [fenced(s), *(_cell(section.cell(board, s, n)) for n in board.lengths)]
        for s in board.labels
    ]
    return f"{board.title}, {board.unit}:\n\n" + markdown_table(["method", *heads], rows)


def _cell(one: Shown) -> str:
    value = f"**{one.value}**" if one.mark == BEST else one.value
    near = f"{NEAR} " if one.mark == TIED else ""
    return f"{near}{value}{one.sign}{f' ({one.swing})' if one.swing else ''}"
