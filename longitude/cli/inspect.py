"""`longitude inspect`: a checkpoint's position encoding, how far it reaches, and its faults."""

from __future__ import annotations

from typing import Annotated

import typer

from longitude.cli import options as o

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name on the Hub, a folder, a config.json, a .gguf file, or tiny-rope.",
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Every known model type, in one table.")]
To = Annotated[
    str | None,
    typer.Option("--to", metavar="LENGTH", help="A length to reach: 32768, 32k, or 4x the window."),
]
Weights = Annotated[
    bool,
    typer.Option(
        "--weights", help="Load the weights, and measure scores by distance, heads and sinks."
    ),
]
Tokens = Annotated[
    int | None, typer.Option("--length", help="Tokens for --weights. [default: twice the window]")
]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A file or folder for --weights to read; can be repeated. [default: Python's help "
        "topics]",
    ),
]


def inspect(
    model: Source = None,
    every: Every = False,
    to: To = None,
    weights: Weights = False,
    length: Tokens = None,
    text: Texts = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Show which position encoding a model has, and what follows from it.

    From its configuration alone: the encoding of each part and layer; the window, and the entry
    that sets it; wavelengths against it; which dimensions completed a rotation in training, how far
    that reaches, and the smallest base for the window; faults of the file with their fixes, and
    what runtimes compute from it. The exit code is 1 if the file has a fault.
    """
    from longitude.cli.output import print_result
    from longitude.core.validate import UserError
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
        raise typer.Exit(1)
