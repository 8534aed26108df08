"""`longitude explore`: a page on which schemes move, served on this machine alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from longitude.explorer.options import Asked

Picked = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="To start from: a name on the Hub, a folder, a config.json, a .gguf file, tiny-rope.",
    ),
]
Schemes = Annotated[
    str | None,
    typer.Option(help='Up to three methods or schemes: "yarn; leaky_rerope; rope() + logn(4096)".'),
]
Length = Annotated[int | None, typer.Option(help="Tokens drawn. [default: 4 times the window]")]
Port = Annotated[int, typer.Option(help="Of the page on 127.0.0.1; 0 takes any that is free.")]
Still = Annotated[
    Path | None,
    typer.Option("--export", help="Write a still page into this file (.html) and serve nothing."),
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Open no browser.")]


def explore(
    model: Picked = None,
    schemes: Schemes = None,
    length: Length = None,
    port: Port = 8470,
    export: Still = None,
    no_browser: NoBrowser = False,
    as_json: o.Json = False,
) -> None:
    """Open a page where base, window, factor and method move, and schemes stand side by side.

    Distances that a model believes, wavelengths, decay, biases, masks and what a cache keeps, drawn
    as you move; the scheme's text, code and each runtime's settings to copy. The page is served on
    127.0.0.1, loads nothing from elsewhere, and its link carries what it shows. Ctrl-C ends it.
    --json prints the numbers of the state and serves nothing.
    """
    from longitude.cli.output import say
    from longitude.explorer.data import drawn
    from longitude.explorer.static import check_name, write

    if export is not None:
        check_name(export)  # before any work is done
    asked = _asked(model, schemes, length)
    if export is not None:
        write(asked, export)
        say(f"wrote {export}")
    if as_json:
        print(drawn(asked))
    if export is None and not as_json:
        _serve(asked, port, no_browser)


def _asked(model: str | None, schemes: str | None, length: int | None) -> Asked:
    """What the page is to show first."""
    from dataclasses import replace
    from urllib.parse import parse_qsl

    from longitude.core.validate import UserError
    from longitude.explorer.models import by_name
    from longitude.explorer.options import COLUMNS, WRITTEN, Asked, Column, read

    asked = by_name(model).asked if model else Asked()
    texts = [text.strip() for text in (schemes or "").split(";") if text.strip()]
    if len(texts) > COLUMNS:
        raise UserError(
            f"--schemes has {len(texts)}, but the page shows three at most: take some away."
        )
    columns = tuple(Column(WRITTEN, text=t) if "(" in t else Column(t) for t in texts)
    if columns:
        asked = replace(asked, columns=columns)
    if length is not None:
        asked = replace(asked, length=length)
    return read(parse_qsl(asked.link))  # which says what is out of bounds


def _serve(asked: Asked, port: int, no_browser: bool) -> None:
    from longitude.core.validate import UserError

    try:
        from longitude.explorer.serving import serve
    except ImportError:
        raise UserError(
            "the page needs starlette and uvicorn: pip install 'longitude[explore]', or write a "
            "still one with --export page.html."
        ) from None
    serve(asked, port, browse=not no_browser)
