"""`longitude export`: a scheme as settings of the runtime that is to serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o
from longitude.cli.output import print_json, say
from longitude.runtimes import names

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        help="A name on the Hub, a folder, a .gguf file or tiny-rope; a model or adapter of "
        "`longitude tune`, with its own scheme; or a folder that `longitude extend` wrote: each "
        "runtime then gets the best scheme that it can serve.",
    ),
]
SchemeText = Annotated[
    str | None,
    typer.Option("--scheme", help='As in "rope(frequencies=yarn(4, original=8192))".'),
]
For = Annotated[
    str,
    typer.Option("--for", help=f"{', '.join(names())}; several joined by commas, or all."),
]
Version = Annotated[
    str | None, typer.Option(help="Of the runtime. [default: the newest that is known]")
]
To = Annotated[
    str | None,
    typer.Option(help="Tokens to serve: 32768, 32k, 4x. [default: by the scheme's factor]"),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder to write. [default: NAME-TARGET if there are files to write; the command of a "
        "single runtime is only printed]"
    ),
]
Weights = Annotated[str, typer.Option(help="In folders: link, copy or none.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare the new GGUF file in llama.cpp to Hugging Face.")
]
ModelOfRun = Annotated[
    str | None, typer.Option("--model", help="Where the model of a run is, if it was moved.")
]


def export(
    source: Source,
    scheme: SchemeText = None,
    runtime: For = "transformers",
    version: Version = None,
    to: To = None,
    out: Out = None,
    weights: Weights = "link",
    verify: Verify = False,
    model: ModelOfRun = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Write a scheme as the runtime's own settings, after checking what it will compute from them.

    For transformers a folder with a config.json that versions 4 and 5 read alike, raised lengths
    and a model card; for the others the command or file of the version named. A scheme that a
    runtime can't serve is refused, with the nearest that it can. The model itself is not changed.
    """
    from longitude.runtimes.api import ExportOptions
    from longitude.runtimes.api import export as run

    options = ExportOptions(
        runtimes=runtime,
        scheme=scheme,
        version=version,
        to=to,
        out=out,
        weights=weights,
        verify=verify,
        source=model,
        revision=revision,
    )
    result = run(source, options=options)
    if as_json:
        print_json(result.to_json())
    elif result.holds:
        print(result.table())
        for line in result.notes:
            say(line)
    if not result.holds:
        for proof in result.verified:
            say(str(proof))
        raise typer.Exit(1)
