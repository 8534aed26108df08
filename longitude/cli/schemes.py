"""`longitude schemes`: every part and preset, with its paper."""

from __future__ import annotations

from typing import Annotated

import typer

from longitude.cli import options as o


def schemes(
    site: Annotated[str | None, typer.Option(help="Only the parts of one site, as bias.")] = None,
    as_json: o.Json = False,
) -> None:
    """List every part and every preset, with its meaning and its paper."""
    from longitude.cli.output import print_result
    from longitude.inspection import api

    print_result(api.schemes(site), as_json)
