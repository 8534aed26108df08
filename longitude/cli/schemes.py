"""`longitude schemes`: every part and preset, with its paper."""

from __future__ import annotations

from typing import Annotated

import typer


def schemes(
    site: Annotated[str | None, typer.Option(help="Only the parts of one site, as bias.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data.")] = False,
) -> None:
    """List every part and every preset, with its meaning and its paper."""
    from longitude.cli.output import console, print_json
    from longitude.inspection.catalogue import check_site, parts, presets
    from longitude.inspection.rows import plain_rows as plain
    from longitude.viz.terminal import listing

    check_site(site)
    found, named = parts(site), () if site else presets()
    if as_json:
        print_json({"parts": plain(found), "presets": plain(named)})
    else:
        listing(found, named, console())
