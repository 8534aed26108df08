"""`longitude export`, `lint` and `verify`: a scheme as settings of the runtime that is to serve it,
what runtimes compute from a model's settings by their source, and what they compute when run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import print_json, print_result, say
from longitude.runtimes import names


def export(
    source: Annotated[
        str,
        Argument(
            metavar="MODEL|RUN",
            help="A name on the Hub, a folder, a .gguf file or tiny-rope; a model or adapter of "
            "`longitude tune`, with its own scheme; or a folder that `longitude extend` wrote: "
            "each runtime then gets the best scheme that it can serve.",
        ),
    ],
    scheme: Annotated[
        str | None, Option(help='As in "rope(frequencies=yarn(4, original=8192))".')
    ] = None,
    runtime: Annotated[
        str, Option("--for", help=f"{', '.join(names())}; several joined by commas, or all.")
    ] = "transformers",
    version: Annotated[
        str | None, Option(help="Of the runtime. [default: the newest that is known]")
    ] = None,
    to: o.Served = None,
    out: Annotated[
        Path | None,
        Option(
            help="Folder to write. [default: NAME-TARGET if there are files to write; the command "
            "of a single runtime is only printed]"
        ),
    ] = None,
    weights: Annotated[str, Option(help="In folders: link, copy or none.")] = "link",
    verify: Annotated[
        bool,
        Option("--verify", help="Run what is written in the runtimes installed here."),
    ] = False,
    model: Annotated[
        str | None, Option(help="Where the model of a run is, if it was moved.")
    ] = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Write a scheme as the runtime's own settings, after checking what it will compute from them.

    For transformers a folder with a config.json that versions 4 and 5 read alike, raised lengths
    and a model card; for the others the command or file of the version named. A scheme that a
    runtime can't serve is refused, with the nearest that it can. The model itself is not changed.
    """
    given = o.without(locals(), "source", "runtime", "model", "as_json")
    from longitude.runtimes import api

    options = api.ExportOptions(**given, runtimes=runtime, source=model)
    result = api.export(source, options=options)
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


def lint(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="A config.json, a folder, an adapter's folder, a name on the Hub, a .gguf file or "
            "tiny-rope.",
        ),
    ],
    runtimes: Annotated[
        str,
        Option(
            "--for",
            help="Runtimes with commas between them, each with a version if wanted, as "
            "vllm,transformers==4.51.3; or all.",
        ),
    ] = "all",
    scheme: Annotated[
        str | None, Option(help="What is meant, if not what the settings mean.")
    ] = None,
    settings: Annotated[
        str,
        Option(
            "--with",
            help='Settings given at the start, as JSON: {"--hf-overrides": {…}, '
            '"--max-model-len": 32768}, {"-c": 32768, "--rope-scaling": "yarn"}, …',
        ),
    ] = "{}",
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Show what each runtime would compute from a model's settings, against what they mean.

    The largest relative difference of a frequency, the factor on cosine and sine, and the longest
    input, with the known issue behind each difference and its fix. The exit code is 1 if any
    differs.
    """
    given = o.without(locals(), "model", "as_json")
    from longitude.runtimes import api

    result = api.lint(model, options=api.LintOptions(**given))
    print_result(result, as_json)
    if not result.same:
        raise Exit(1)


def verify(
    model: Annotated[
        str,
        Argument(metavar="MODEL", help="A folder, a name on the Hub, a .gguf file or tiny-rope."),
    ],
    runtimes: Annotated[
        str,
        Option(
            "--in", help="transformers, vllm, llama.cpp, mlx; several joined by commas, or all."
        ),
    ] = "all",
    scheme: Annotated[
        str | None,
        Option(
            help="Is written for each runtime first. [default: what the model was saved with, or "
            "else its own settings, as they are]"
        ),
    ] = None,
    to: o.Served = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Run a model in the runtimes that are installed, and compare them with Hugging Face.

    The largest difference of a log-probability, inside the trained window and past it, between the
    runtime and the scheme as Longitude runs it, both in float32. A runtime that is not installed is
    named with the package to install. The exit code is 1 if any differs, with the cause if known.
    """
    given = o.without(locals(), "model", "as_json")
    from longitude.runtimes import api

    result = api.verify(model, options=api.VerifyOptions(**given))
    print_result(result, as_json)
    if not result.holds:
        raise Exit(1)
