"""`longitude lint`: what runtimes really compute from a model's settings."""

from __future__ import annotations

from typing import Annotated

import typer

from longitude.cli import options as o
from longitude.cli.output import print_result

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A config.json, a folder, an adapter's folder, a name on the Hub, a .gguf file or "
        "tiny-rope.",
    ),
]
For = Annotated[
    str,
    typer.Option(
        "--for",
        help="Runtimes with commas between them, each with a version if wanted, as "
        "vllm,transformers==4.51.3; or all.",
    ),
]
With = Annotated[
    str,
    typer.Option(
        "--with",
        help='Settings given at the start, as JSON: {"--hf-overrides": {…}, '
        '"--max-model-len": 32768}, {"-c": 32768, "--rope-scaling": "yarn"}, …',
    ),
]
SchemeText = Annotated[
    str | None, typer.Option("--scheme", help="What is meant, if not what the settings mean.")
]


def lint(
    model: Source,
    runtimes: For = "all",
    scheme: SchemeText = None,
    settings: With = "{}",
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Show what each runtime would compute from a model's settings, against what they mean.

    The largest relative difference of a frequency, the factor on cosine and sine, and the longest
    input, with the known issue behind each difference and its fix. The exit code is 1 if any
    differs.
    """
    from longitude.runtimes.api import LintOptions
    from longitude.runtimes.api import lint as run

    options = LintOptions(runtimes=runtimes, scheme=scheme, settings=settings, revision=revision)
    result = run(model, options=options)
    print_result(result, as_json)
    if not result.same:
        raise typer.Exit(1)
