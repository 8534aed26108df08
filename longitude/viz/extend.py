"""What `longitude extend` found: in the terminal, as a page, as a summary and as pictures."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import vl_convert
from rich.console import Console

from longitude.core.validate import UserError
from longitude.eval.records import Measurement
from longitude.viz.extend_charts import charts, standing
from longitude.viz.extend_page import page
from longitude.viz.extend_section import MapPoint, Section, tidied
from longitude.viz.extend_terminal import terminal
from longitude.viz.extend_text import markdown
from longitude.viz.files import replace_file


def section(
    found: Sequence[Measurement],
    recommendation: Mapping[str, Any] | None = None,
    what_next: Sequence[tuple[str, str]] = (),
    maps: Mapping[str, Sequence[MapPoint]] | None = None,
    run: str = "",
    by_size: Collection[str] = (),
) -> Section:
    """One model's measurements, ready to be shown; what to type next may stand in the
    recommendation, as it does in its file."""
    if not found:
        raise UserError("There are no measurements to report, but got 0 rows: measure some first.")
    if len({one.key.subject for one in found}) > 1:
        raise UserError("A section is of one model, but got rows of several: make one for each.")
    told = recommendation or {}
    following = what_next or [(n["title"], n["command"]) for n in told.get("next", ())]
    return Section(tidied(found), told, tuple(following), maps or {}, run, by_size)


def show(
    found: Sequence[Measurement],
    recommendation: Mapping[str, Any] | None,
    console: Console,
    what_next: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the table of all methods and the recommendation."""
    terminal(section(found, recommendation, what_next), console)


def show_section(one: Section, console: Console) -> None:
    """Print a section."""
    terminal(one, console)


def table(one: Section, *, color: bool = False, width: int = 100) -> str:
    """What the terminal shows of a section, as text."""
    out = Console(
        file=StringIO(), width=width, highlight=False, force_terminal=color, no_color=not color
    )
    terminal(one, out)
    return out.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def write_page(sections: Sequence[Section], path: Path, title: str | None = None) -> None:
    """Write the page of one model or several: one file that loads nothing."""
    named = title or (sections[0].title if len(sections) == 1 else "Models beside each other")
    replace_file(path, page(sections, named).encode())


def write_summary(sections: Sequence[Section], path: Path, pictures: Sequence[Path] = ()) -> None:
    """Write the summary for a model card; it shows the pictures given, by paths beside it."""
    drawn = [(p.stem, p.relative_to(path.parent).as_posix()) for p in pictures]
    texts = [markdown(s, drawn if n == 0 else ()) for n, s in enumerate(sections)]
    replace_file(path, "\n".join(texts).encode())


def write_charts(one: Section, folder: Path) -> list[Path]:
    """Write each chart as a PNG; their paths."""
    written = []
    for name, spec in _pictures(one):
        path = folder / f"{name}.png"
        replace_file(path, vl_convert.vegalite_to_png(json.dumps(spec), scale=2))
        written.append(path)
    return written


def _pictures(one: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    every = charts(one)
    names = [*dict.fromkeys(c.name.split("-")[0] for c in every)]
    for name in names:
        yield name, standing(one, [c for c in every if c.name.split("-")[0] == name])
