"""`longitude schemes`, `show`, `check`, `explore` and `inspect`: every part and preset, pictures of
a scheme, its properties as numbers, schemes side by side, and the encoding of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import display, print_json, print_result, say
from longitude.core.validate import UserError

EXAMPLE = "As in 'rope(frequencies=ntk(4)) + logn(4096)'."
Dim = Annotated[int | None, Option(help="Dimensions of a head. [default: 64, or as needed]")]
Heads = Annotated[int, Option(help="Heads of a layer.")]


def schemes(
    site: Annotated[str | None, Option(help="Only the parts of one site, as bias.")] = None,
    as_json: o.Json = False,
) -> None:
    """List every part and every preset, with its meaning and its paper."""
    from longitude.inspection import api

    print_result(api.schemes(site), as_json)


def show(
    scheme: Annotated[str, Argument(help=EXAMPLE)],
    length: Annotated[int | None, Option(help="Tokens. [default: to fit the scheme]")] = None,
    dim: Dim = None,
    heads: Heads = 8,
    as_json: o.Json = False,
    out: Annotated[
        Path | None, Option(help="Also draw into this file: .html, .png or .svg.")
    ] = None,
) -> None:
    """Print a scheme's parts and draw what they do.

    Only what the scheme has: its distance map, the decay of its rotation, wavelengths, the scale of
    queries, the bias of a few heads, and which pairs are visible.
    """
    from longitude.inspection import api
    from longitude.viz import files

    if out:
        files.check_kind(out)  # before any work is done
    result = api.show(scheme, options=api.ShowOptions(length, dim, heads))
    print_result(result, as_json)
    if out:
        say(f"wrote {result.report(out)}")


def check(
    scheme: Annotated[str | None, Argument(metavar="SCHEME", help=EXAMPLE)] = None,
    every: Annotated[bool, Option("--all", help="Every preset, in one table.")] = False,
    dim: Dim = None,
    heads: Heads = 8,
    length: Annotated[
        int | None,
        Option(help="Tokens. [default: 4096, or past the lengths that the scheme names]"),
    ] = None,
    trained: Annotated[
        int | None,
        Option(help="Trained length in tokens. [default: the scheme's, or length / 4]"),
    ] = None,
    markdown: Annotated[bool, Option("--markdown", help="The table of --all as Markdown.")] = False,
    as_json: o.Json = False,
) -> None:
    """Measure a scheme's uniqueness, extrapolation, relativity and decay.

    Uniqueness is the smallest distance between the codes of two positions, 0 if two share one.
    Extrapolation is what a query meets past the trained length that training never showed: angles,
    biases, vectors. Relativity is how far scores are from a function of i - j, exactly 0 if they
    are one. Decay is where the mean cosine, its bound, the bias and the product of position vectors
    reach their minimum. Distances are in units of scores: random content alone gives scores of
    variance 1. Learned parts are measured at fresh weights.
    """
    from longitude.inspection import api

    if every == (scheme is not None):
        raise UserError("check takes one scheme in quotes, or --all for every preset: give one.")
    if markdown and not every:
        raise UserError("--markdown writes the table of --all: give both, or neither.")
    with display(quiet=not every) as progress:
        options = api.CheckOptions(dim, heads, length, trained, progress)
        result = api.check(scheme, options=options)
    if markdown and not as_json:
        print(result.markdown(), end="")
    else:
        print_result(result, as_json)


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


def inspect(
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="A name on the Hub, a folder, a config.json, a .gguf file, or tiny-rope.",
        ),
    ] = None,
    every: Annotated[bool, Option("--all", help="Every known model type, in one table.")] = False,
    to: Annotated[
        str | None,
        Option(metavar="LENGTH", help="A length to reach: 32768, 32k, or 4x the window."),
    ] = None,
    weights: Annotated[
        bool,
        Option(
            "--weights", help="Load the weights, and measure scores by distance, heads and sinks."
        ),
    ] = False,
    length: Annotated[
        int | None, Option(help="Tokens for --weights. [default: twice the window]")
    ] = None,
    text: Annotated[
        list[str] | None,
        Option(
            help="A file or folder for --weights to read; can be repeated. [default: Python's help "
            "topics]"
        ),
    ] = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Show which position encoding a model has, and what follows from it.

    From its configuration alone: the encoding of each part and layer; the window, and the entry
    that sets it; wavelengths against it; which dimensions completed a rotation in training, how far
    that reaches, and the smallest base for the window; faults of the file with their fixes, and
    what runtimes compute from it. The exit code is 1 if the file has a fault.
    """
    from longitude.inspection import api

    if every == (model is not None):
        raise UserError("inspect takes one model, or --all for every known type: give one.")
    if every and (to or weights):
        raise UserError("--to and --weights are about one model: give its name in place of --all.")
    if model is None:
        return print_result(api.known_models(), as_json)
    options = api.InspectOptions(to, weights, length, tuple(text or ()), revision)
    result = api.inspect(model, options=options)
    print_result(result, as_json)
    if result.faults:
        raise Exit(1)
