"""`longitude schemes`, `show` and `check`: every part and preset, pictures of a scheme, and its
properties as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from longitude.cli import options as o
from longitude.cli.output import print_result, say
from longitude.cli.progress import display
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
