"""`longitude check`: uniqueness, extrapolation, relativity and decay of an encoding, as numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from longitude.cli import options as o

SchemeText = Annotated[
    str | None,
    typer.Argument(metavar="SCHEME", help="As in 'rope(frequencies=ntk(4)) + logn(4096)'."),
]
Every = Annotated[bool, typer.Option("--all", help="Every preset, in one table.")]
Dim = Annotated[int | None, typer.Option(help="Dimensions of a head. [default: 64, or as needed]")]
Heads = Annotated[int, typer.Option(help="Heads of a layer.")]
Length = Annotated[
    int | None,
    typer.Option(help="Tokens. [default: 4096, or past the lengths that the scheme names]"),
]
Trained = Annotated[
    int | None,
    typer.Option(help="Trained length in tokens. [default: the scheme's, or length / 4]"),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="The table of --all as Markdown.")]


def check(
    scheme: SchemeText = None,
    every: Every = False,
    dim: Dim = None,
    heads: Heads = 8,
    length: Length = None,
    trained: Trained = None,
    markdown: Markdown = False,
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
    from longitude.cli.output import print_result
    from longitude.cli.progress import display
    from longitude.core.validate import UserError
    from longitude.inspection import api

    if every == (scheme is not None):
        raise UserError("check takes one scheme in quotes, or --all for every preset: give one.")
    if markdown and not every:
        raise UserError("--markdown writes the table of --all: give both, or neither.")
    with display(quiet=not every) as progress:
        sizes = {"dim": dim, "heads": heads, "length": length, "trained": trained}
        result = api.check(scheme, options=api.CheckOptions(**sizes, progress=progress))
    if markdown and not as_json:
        print(result.markdown(), end="")
    else:
        print_result(result, as_json)
