"""`longitude report`: runs of `longitude extend` joined into one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from longitude.cli import options as o
from longitude.cli.output import print_json, print_result, say


def report(
    runs: Annotated[list[Path], Argument(help="Folders that `longitude extend` wrote.")],
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    as_json: o.Json = False,
) -> None:
    """Join runs into one report: a section for each model, and one page for all of them.

    Runs of one model share a table where they read the same documents by the same protocols.
    """
    from longitude.extension.api import report as join

    result = join(*runs)
    result.report(out)
    if as_json:
        print_json({"report": str(out), **result.to_json()})
    else:
        print_result(result, as_json)
    say(f"wrote {out}")
