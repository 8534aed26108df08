"""What `longitude extend` found, as a section of a model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longitude.eval.compare import Board
from longitude.report.extending.advice import advice, notes, scores, searches
from longitude.report.extending.section import BEST, NEAR, NOT_ASKED, TIED, Section, Shown
from longitude.report.markdown import escaped, fenced, markdown_table


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
    refused = "".join(f"- {escaped(why)}\n" for why in [*section.refusals(), *notes(section)])
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
    note = f"**Bold**: the best; {NEAR}: can’t be told from it; ± and ranges are 95 % intervals."
    more = f" {NOT_ASKED}" if section.any_assumed else ""
    return markdown_table(heads, rows) + f"\n{note}{more}\n"


def _by_length(section: Section, board: Board) -> str:
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
