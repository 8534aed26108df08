"""`longitude inspect`: a checkpoint's position encoding, how far it reaches, and its faults."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import options as o
from longitude.cli.output import print_result
from longitude.core.validate import UserError


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
