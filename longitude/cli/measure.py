"""`longitude extend`, `report` and `probe`: methods for a longer context measured on your model,
runs joined into one report, and what a server really does with a long prompt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import display, print_json, print_result, say
from longitude.core.validate import UserError
from longitude.eval.tasks import task_names


def extend(
    model: o.Model = "tiny-rope",
    to: o.Target = None,
    methods: Annotated[
        str,
        Option(
            help="auto, all, or names, the table's labels and schemes joined by ;, as in yarn; "
            "rerope(512); rope(base=500000)."
        ),
    ] = "auto",
    text: o.Text = None,
    docs: Annotated[int, Option(help="Documents to compare on.")] = 4,
    lengths: Annotated[
        str | None, Option(help="Lengths to measure at; without, doubling to the target.")
    ] = None,
    goal: Annotated[
        str,
        Option(
            help="What the advice is for: context (use a longer one), stream (read on without end "
            "in constant memory) or short (make more of the window)."
        ),
    ] = "context",
    tasks: Annotated[
        str,
        Option(help=f"What to measure, joined by commas: {', '.join(task_names())}; all; none."),
    ] = "all",
    questions: Annotated[
        int | None,
        Option(help="Prompts of a family at each length in a round. [default: 2]"),
    ] = None,
    budget: Annotated[
        str | None, Option(help="Time to spend, as in 10m: measures what fits, and says so.")
    ] = None,
    search: Annotated[
        bool, Option("--search", help="Then search parameters around the best methods.")
    ] = False,
    lm_eval: Annotated[
        str | None, Option("--lm-eval", help="lm-eval tasks for the best method, as in a,b.")
    ] = None,
    limit: Annotated[
        int | None, Option(help="Samples of each lm-eval task; 0 for all of them.")
    ] = 50,
    engine: Annotated[str, Option(help="local, or ray: an existing Ray cluster.")] = "local",
    context_parallel: Annotated[
        int | None,
        Option(
            help="Ranks under torchrun, or GPUs of a Ray cluster, that share the tokens of each "
            "text. [default: the fewest whose memory holds --to]"
        ),
    ] = None,
    device: o.ModelDevice = "auto",
    dtype: o.ModelDType = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    seed: Annotated[int, Option(help="Of documents and questions.")] = 0,
    out: Annotated[
        Path | None, Option(help="Folder of rows and report. [default: runs/NAME-TARGET]")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the plan and what it would cost; run nothing.")
    ] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure every way to a longer context on your model, and recommend one.

    Every method reads the same documents and answers the same questions: how much of what far text
    tells is still used (kept context), which facts are retrieved, the loss past the window and what
    it costs inside, speed and memory. Methods that fall behind read fewer documents. Then one
    recommendation for --goal, with the effective length of every method, and one for each runtime.

    MODEL may be the URL of a server, as http://127.0.0.1:8000/v1: its one scheme is measured as far
    as a server allows.

    All numbers go to results.sqlite in --out; the same command again resumes where one was stopped,
    and measures nothing twice. The report is one page, report.html. Under torchrun the processes
    share the methods, and the tokens of each text where one device can't hold --to.
    """
    given = o.without(locals(), "model", "to", "dry_run", "as_json", "quiet")
    from longitude.extension.api import ExtendOptions, estimate
    from longitude.extension.api import extend as run
    from longitude.training.distributed import is_first_process

    given |= {"text": tuple(text or ()), "lengths": o.integers("lengths", lengths)}
    given |= {"tasks": o.names(tasks), "lm_eval": o.names(lm_eval or ""), "limit": limit or None}
    quiet = quiet or not is_first_process()
    with display(quiet, resumes=True) as progress:
        options = ExtendOptions(**given, progress=progress)
        result = (estimate if dry_run else run)(model, to=to, options=options)
    if is_first_process():
        print_result(result, as_json)
    if not dry_run and not quiet:
        folder = getattr(result, "folder", None)
        say(f"wrote {folder}/report.html, summary.md, recommendation.json and rows.jsonl.")


def report(
    runs: Annotated[list[Path], Argument(help="Folders that `longitude extend` wrote.")],
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    as_json: o.Json = False,
) -> None:
    """Join runs into one report: a section for each model, and one page for all of them.

    Runs of one model share a table where they read the same documents by the same protocols.
    """
    from longitude.extension.api import report as join

    result = join(*runs)
    result.report(out)
    if as_json:
        print_json({"report": str(out), **result.to_json()})
    else:
        print_result(result, as_json)
    say(f"wrote {out}")


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
