"""`longitude show`: a scheme's parts, and pictures of what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def show(
    scheme: Annotated[str, typer.Argument(help="As in 'rope(frequencies=ntk(4)) + logn(4096)'.")],
    length: Annotated[int | None, typer.Option(help="Tokens; chosen to fit if not given.")] = None,
    dim: Annotated[
        int | None, typer.Option(help="Dimensions of a head; 64 if any will do.")
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also draw into this file: .html, .png or .svg.")
    ] = None,
) -> None:
    """Print a scheme's parts and draw what they do.

    Only what the scheme has: the distances it makes a model believe, the decay of its rotation,
    wavelengths, the scale of queries, the bias of a few heads, and which pairs are visible.
    """
    from longitude.cli.output import console, print_json, say
    from longitude.core.text import parse
    from longitude.inspection.page import page
    from longitude.inspection.rows import plain_rows as plain
    from longitude.viz import files, terminal

    if out:
        files.check_kind(out)  # before any work is done
    rows = page(parse(scheme), length, dim, heads)
    if as_json:
        print_json(plain(rows))
    else:
        terminal.show(rows, console())
    if out:
        files.write(rows, out)
        say(f"wrote {out}")
