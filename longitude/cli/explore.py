"""`longitude explore`: a page on which schemes move, served on this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from longitude.cli import options as o
from longitude.cli.output import print_json, say


def explore(
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="To start from: a name on the Hub, a folder, a config.json, a .gguf file, "
            "tiny-rope.",
        ),
    ] = None,
    schemes: Annotated[
        str | None,
        Option(help='Up to three methods or schemes: "yarn; leaky_rerope; rope() + logn(4096)".'),
    ] = None,
    length: Annotated[
        int | None, Option(help="Tokens drawn. [default: 4 times the window]")
    ] = None,
    port: Annotated[int, Option(help="Of the page on 127.0.0.1; 0 takes any that is free.")] = 8470,
    export: Annotated[
        Path | None,
        Option(help="Write a static page into this file (.html) and serve nothing."),
    ] = None,
    no_browser: Annotated[bool, Option("--no-browser", help="Open no browser.")] = False,
    as_json: o.Json = False,
) -> None:
    """Open a page where base, window, factor and method move, and schemes stand side by side.

    Effective distances, wavelengths, decay, biases, masks and what a cache keeps, drawn as you
    move; the scheme's text, code and each runtime's settings to copy. The page is served on
    127.0.0.1, loads nothing from elsewhere, and its link carries what it shows. Ctrl-C ends it.
    --json prints the numbers of the state and serves nothing.
    """
    from longitude.explorer import api

    if export is not None:
        api.check_name(export)  # before any work is done
    result = api.explore(model, options=api.ExploreOptions(schemes, length))
    if export is not None:
        say(f"wrote {result.report(export)}")
    if as_json:
        print_json(result.to_json())
    if export is None and not as_json:
        result.serve(port, browser=not no_browser)
