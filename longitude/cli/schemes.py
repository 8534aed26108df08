"""`longitude schemes`, `show`, `check`, `explore` and `inspect`: list parts and presets, draw a
scheme, measure its properties, compare schemes side by side, and read a checkpoint's encoding.
`export`, `lint` and `verify`: write a scheme as a runtime's settings, derive from the runtimes'
source what they compute from a model's settings, and run them to see what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import display, print_json, print_result, say
from longitude.core.validate import UserError
from longitude.options import (
    CheckOptions,
    ExploreOptions,
    ExportOptions,
    InspectOptions,
    LintOptions,
    ShowOptions,
    VerifyOptions,
)

EXAMPLE = "As in 'rope(frequencies=ntk(4)) + logn(4096)'."


def schemes(
    site: Annotated[str | None, Option(help="Only the parts of one site, as bias.")] = None,
    as_json: o.Json = False,
) -> None:
    """List every part and every preset, with its meaning and its paper."""
    from longitude.inspection import api

    print_result(api.schemes(site), as_json)


@o.takes(ShowOptions)
def show(
    options: ShowOptions,
    scheme: Annotated[str, Argument(help=EXAMPLE)],
    *,
    as_json: o.Json = False,
    out: Annotated[
        Path | None, Option(help="Also draw into this file: .html, .png or .svg.")
    ] = None,
) -> None:
    """Print a scheme's parts and draw what they do.

    Draws what the scheme has: its distance map, the decay of its rotation, wavelengths, the scale
    of queries, the bias of a few heads, and which pairs are visible.
    """
    from longitude.inspection import api
    from longitude.viz import files

    if out:
        files.check_kind(out)  # before any work is done
    result = api.show(scheme, options=options)
    print_result(result, as_json)
    if out:
        say(f"wrote {result.report(out)}")


@o.takes(CheckOptions)
def check(
    options: CheckOptions,
    scheme: Annotated[str | None, Argument(metavar="SCHEME", help=EXAMPLE)] = None,
    every: Annotated[bool, Option("--all", help="Every preset, in one table.")] = False,
    *,
    markdown: Annotated[bool, Option("--markdown", help="The table of --all as Markdown.")] = False,
    as_json: o.Json = False,
) -> None:
    """Measure a scheme's uniqueness, extrapolation, relativity and decay.

    Uniqueness is the smallest distance between the codes of two positions, 0 if two share a code.
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
        result = api.check(scheme, options=replace(options, progress=progress))
    if markdown and not as_json:
        print(result.markdown(), end="")
    else:
        print_result(result, as_json)


@o.takes(ExploreOptions)
def explore(
    options: ExploreOptions,
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="To start from: a name on the Hub, a folder, a config.json, a .gguf file, "
            "tiny-rope.",
        ),
    ] = None,
    *,
    port: Annotated[int, Option(help="Of the page on 127.0.0.1; 0 takes any that is free.")] = 8470,
    export: Annotated[
        Path | None,
        Option(help="Write a static page into this file (.html) and serve nothing."),
    ] = None,
    no_browser: Annotated[bool, Option("--no-browser", help="Open no browser.")] = False,
    as_json: o.Json = False,
) -> None:
    """Open a page of schemes side by side, with controls for base, window, factor and method.

    Shows effective distances, wavelengths, decay, biases, masks and what a cache keeps, redrawn as
    you move the controls; and the scheme's text, code and each runtime's settings to copy. The page
    is served on 127.0.0.1, loads nothing from elsewhere, and its link carries what it shows. Ctrl-C
    ends it. --json prints the numbers that the page would draw and serves nothing.
    """
    from longitude.explorer import api

    if export is not None:
        api.check_name(export)  # before any work is done
    result = api.explore(model, options=options)
    if export is not None:
        say(f"wrote {result.report(export)}")
    if as_json:
        print_json(result.to_json())
    if export is None and not as_json:
        result.serve(port, browser=not no_browser)


@o.takes(InspectOptions)
def inspect(
    options: InspectOptions,
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="A name on the Hub, a folder, a config.json, a .gguf file, or tiny-rope.",
        ),
    ] = None,
    every: Annotated[bool, Option("--all", help="Every known model type, in one table.")] = False,
    *,
    as_json: o.Json = False,
) -> None:
    """Show which position encoding a model has, and what follows from it.

    Reads the configuration alone: the encoding of each part and layer; the window, and the entry
    that sets it; wavelengths against it; which dimensions completed a rotation in training, how far
    that reaches, and the smallest base for the window; faults of the file with their fixes, and
    what runtimes compute from it. The exit code is 1 if the file has a fault.
    """
    from longitude.inspection import api

    if every == (model is not None):
        raise UserError("inspect takes one model, or --all for every known type: give one.")
    if every and (options.to or options.weights):
        raise UserError("--to and --weights are about one model: give its name in place of --all.")
    if model is None:
        return print_result(api.known_models(), as_json)
    result = api.inspect(model, options=options)
    print_result(result, as_json)
    if result.faults:
        raise Exit(1)


@o.takes(ExportOptions)
def export(
    options: ExportOptions,
    model: Annotated[
        str,
        Argument(
            metavar="MODEL|RUN",
            help="A name on the Hub, a folder, a .gguf file or tiny-rope; a model or adapter of "
            "`longitude tune`, with its own scheme; or a folder that `longitude extend` wrote: "
            "each runtime then gets the best scheme that it can serve.",
        ),
    ],
    *,
    as_json: o.Json = False,
) -> None:
    """Write a scheme as the runtime's own settings, after checking what it will compute from them.

    For transformers this is a folder with a config.json that versions 4 and 5 read alike, raised
    lengths and a model card; for others the command or file for the version named. A scheme that a
    runtime can't serve is refused, naming the nearest that it can. The model itself is unchanged.
    """
    from longitude.runtimes import api

    result = api.export(model, options=options)
    if as_json:
        print_json(result.to_json())
    elif result.holds:
        print(result.table())
        for line in result.notes:
            say(line)
    if not result.holds:
        for proof in result.verified:
            say(str(proof))
        raise Exit(1)


@o.takes(LintOptions)
def lint(
    options: LintOptions,
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A config.json, a folder, an adapter's folder, a name on the Hub, a .gguf file or "
            "tiny-rope.",
        ),
    ],
    *,
    as_json: o.Json = False,
) -> None:
    """Show what each runtime would compute from a model's settings, against what they mean.

    Lists the largest relative difference of a frequency, the factor on cosine and sine, and the
    longest input, with the known issue behind each difference and its fix. The exit code is 1 if
    anything differs.
    """
    from longitude.runtimes import api

    result = api.lint(model, options=options)
    print_result(result, as_json)
    if not result.same:
        raise Exit(1)


@o.takes(VerifyOptions)
def verify(
    options: VerifyOptions,
    model: Annotated[
        str,
        Argument(metavar="MODEL", help="A folder, a name on the Hub, a .gguf file or tiny-rope."),
    ],
    *,
    as_json: o.Json = False,
) -> None:
    """Run a model in the runtimes that are installed, and compare them with Hugging Face.

    Prints the largest difference of a log-probability, inside the trained window and past it,
    between the runtime and the scheme as Longitude runs it, both in float32. A runtime that is not
    installed is named with the package to install. The exit code is 1 if any runtime differs, with
    the cause if it is known.
    """
    from longitude.runtimes import api

    result = api.verify(model, options=options)
    print_result(result, as_json)
    if not result.holds:
        raise Exit(1)
