"""`longitude show`: a scheme's parts, and pictures of what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o


def show(
    scheme: Annotated[str, typer.Argument(help="As in 'rope(frequencies=ntk(4)) + logn(4096)'.")],
    length: Annotated[int | None, typer.Option(help="Tokens. [default: to fit the scheme]")] = None,
    dim: Annotated[
        int | None, typer.Option(help="Dimensions of a head. [default: 64, or as needed]")
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 8,
    as_json: o.Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Also draw into this file: .html, .png or .svg.")
    ] = None,
) -> None:
    """Print a scheme's parts and draw what they do.

    Only what the scheme has: its distance map, the decay of its rotation, wavelengths, the scale of
    queries, the bias of a few heads, and which pairs are visible.
    """
    from longitude.cli.output import print_result, say
    from longitude.inspection import api
    from longitude.viz import files

    if out:
        files.check_kind(out)  # before any work is done
    result = api.show(scheme, options=api.ShowOptions(length, dim, heads))
    print_result(result, as_json)
    if out:
        say(f"wrote {result.report(out)}")
