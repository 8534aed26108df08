"""`longitude probe`: what a server really does with a long prompt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import display, print_result, say
from longitude.core.validate import UserError


def probe(
    urls: Annotated[
        list[str],
        Argument(
            metavar="URL [URL]",
            help="Of an OpenAI-compatible API, as in http://127.0.0.1:8000/v1; a second one should "
            "be its equal.",
        ),
    ],
    model: Annotated[
        str | None, Option(help="The name of the model, where the server has several.")
    ] = None,
    to: Annotated[
        str | None,
        Option(help="Tokens to probe up to: 131072 or 128k. [default: what the server says]"),
    ] = None,
    reference: Annotated[
        str | None,
        Option(
            metavar="MODEL|runs/NAME",
            help="The checkpoint that is served, or the folder of a run of `longitude extend`: "
            "tells which scheme is in force.",
        ),
    ] = None,
    tasks: Annotated[
        str, Option(help="Families of questions, joined by commas, as in passkey,keys; or all.")
    ] = "all",
    questions: Annotated[int, Option(help="Of each family and depth, at each length.")] = 2,
    budget: Annotated[
        str | None, Option(help="Time to spend, as in 5m: measures what fits, and says so.")
    ] = None,
    concurrency: Annotated[int, Option(help="Requests at the same time.")] = 4,
    runtime: Annotated[
        str | None, Option(help="vllm, sglang, llama.cpp, ollama, …, where the server hides it.")
    ] = None,
    text: Annotated[
        list[str] | None,
        Option(help="Fill prompts with this file or folder instead: it leaves your machine."),
    ] = None,
    save: Annotated[
        Path | None, Option(metavar="FILE", help="Write the probe, for a later --against.")
    ] = None,
    against: Annotated[
        Path | None, Option(metavar="FILE", help="A saved probe: same prompts, what changed?")
    ] = None,
    key_file: Annotated[
        Path | None,
        Option(help="Holds the server's key. [default: the variable LONGITUDE_API_KEY]"),
    ] = None,
    seed: Annotated[int, Option(help="Of the questions.")] = 0,
    device: o.ModelDevice = "auto",
    out: Annotated[Path, Option(help="Folder of answers and report.")] = Path("runs/probe"),
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print how many requests and tokens at most; send none.")
    ] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Find out what a server really does with a long prompt.

    Where input ends, and whether in silence; how far questions are answered, by length and depth,
    and how fast; whether the same prompt gets the same answer; with --reference, which scheme is in
    force; with a second URL or --against, what differs. Ends with a verdict; the exit code is 1 if
    something is wrong.

    The prompts are generated text. Only the address given is called. The same command resumes a
    probe that was stopped.
    """
    given = o.without(
        locals(), "urls", "save", "against", "key_file", "dry_run", "quiet", "as_json"
    )
    from longitude.core.client import read_key
    from longitude.probing import api

    if len(urls) > 2 or (len(urls) == 2 and against):
        raise UserError(
            "probe takes one URL, one and --against, or two that should be equal: leave the others "
            "out."
        )
    key = read_key(key_file) if key_file else os.environ.get("LONGITUDE_API_KEY") or None
    with display(quiet, resumes=True) as progress:
        given |= {"tasks": o.names(tasks), "text": tuple(text or ()), "key": key}
        options = api.ProbeOptions(**given, progress=progress)
        if dry_run:
            return print_result(api.estimate(urls[0], options=options), as_json)
        result = api.probe(urls[0], urls[1] if len(urls) > 1 else against, options=options)
    if save:
        api.save(result, save)
    print_result(result, as_json)
    if not quiet:
        say(f"wrote {out}/report.html and probe.json.")
    if result.faults:
        raise Exit(1)
