"""`longitude check`: what one asks of an encoding of positions, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from longitude.inspection.rows import Checked

SchemeText = Annotated[
    str | None,
    typer.Argument(metavar="SCHEME", help="As in 'rope(frequencies=ntk(4)) + logn(4096)'."),
]
Every = Annotated[bool, typer.Option("--all", help="Every preset, in one table.")]
Dim = Annotated[
    int | None, typer.Option(help="Dimensions of a head. [default: 64, if any will do]")
]
Heads = Annotated[int, typer.Option(help="Heads of a layer.")]
Length = Annotated[
    int | None,
    typer.Option(help="Tokens. [default: 4096, or past the lengths that the scheme names]"),
]
Trained = Annotated[
    int | None,
    typer.Option(help="Tokens that were trained on. [default: as the scheme says, or length / 4]"),
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

    Uniqueness is the smallest distance between the codes of two positions, 0 where two can't be
    told apart. Extrapolation is what a query meets past the trained length that training never
    showed: angles, biases, vectors. Relativity is how far scores are from a function of i - j,
    exactly 0 where they are one. Decay is where the mean cosine, its bound, the bias and the
    product of positions stop falling. Distances are in scores: random content alone makes scores of
    variance 1. What is learned is measured at fresh weights.
    """
    from longitude.cli.output import console, print_json
    from longitude.core.validate import UserError
    from longitude.viz import properties as checking

    if every == (scheme is not None):
        raise UserError("check takes one scheme in quotes, or --all for every preset: give one.")
    if markdown and not every:
        raise UserError("--markdown writes the table of --all: give both, or neither.")
    found = _measured(scheme, dim, heads, length, trained)
    if as_json:
        print_json([one.plain() for one in found] if every else found[0].plain())
    elif markdown:
        print(checking.markdown(found), end="")
    elif every:
        checking.table(found, console())
    else:
        checking.show(found[0], console())


def _measured(
    scheme: str | None, dim: int | None, heads: int, length: int | None, trained: int | None
) -> list[Checked]:
    from longitude.core.text import parse
    from longitude.inspection import compare as compared
    from longitude.inspection.properties import check as checked

    if scheme is not None:
        return [checked(parse(scheme), dim=dim, heads=heads, length=length, trained=trained)]
    far = compared.LENGTH if length is None else length
    near = max(2, far // 4) if trained is None else trained
    return _all(compared.compare(length=far, trained=near, dim=dim or 64, heads=heads))


def _all(rows: Iterator[Checked]) -> list[Checked]:
    """Every row, and on stderr how far they are, where someone looks on."""
    from rich.console import Console
    from rich.progress import track

    from longitude.presets import PRESETS

    shown = Console(stderr=True)
    bar = {"console": shown, "transient": True, "disable": not shown.is_terminal}
    return [*track(rows, "presets", len(PRESETS), **bar)]
