"""`longitude report`: runs of `longitude extend` joined into one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `longitude extend` wrote.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    as_json: o.Json = False,
) -> None:
    """Join runs into one report: a section for each model, and one page for all of them.

    Runs of one model share a table where they read the same documents by the same protocols.
    """
    from longitude.cli.output import console, print_json, say
    from longitude.core.validate import UserError
    from longitude.extension.folder import joined
    from longitude.viz.extend import plain, show_section, write_page

    if out.suffix.lower() != ".html":
        raise UserError(f"--out {out} names no page: end it in .html.")
    sections = joined(runs)
    write_page(sections, out)
    if as_json:
        print_json({"report": str(out), "models": [plain(s) for s in sections]})
    else:
        for section in sections:
            show_section(section, console())
            console().print()
    say(f"wrote {out}")
