"""`longitude extend`, `report` and `probe`: measure methods for a longer context on a model, join
runs into one report, and find out what a server really does with a long prompt. `train`, `lab` and
`tune`: train a small decoder with a scheme; train schemes short on the same data and test each at
every length; and adapt a checkpoint by a short fine-tune."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from longitude.cli import common as o
from longitude.cli.common import display, print_json, print_result, say
from longitude.core.validate import UserError
from longitude.options import ExtendOptions, ProbeOptions
from longitude.training.options import LabOptions, TrainOptions, TuneOptions


@o.takes(ExtendOptions)
def extend(
    options: ExtendOptions,
    model: o.Model = "tiny-rope",
    to: o.Target = None,
    *,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the plan and what it would cost; run nothing.")
    ] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure every method for a longer context on your model, and recommend one.

    Every method reads the same documents and answers the same questions: how much of the
    information in far text is still used (kept context), which facts are retrieved, the loss past
    the window and its cost inside, speed and memory. Methods that fall behind read fewer documents.
    Then it recommends one for --goal, with every method's effective length, and one per runtime.

    MODEL may be the URL of a server, as in http://127.0.0.1:8000/v1: the one scheme that it runs is
    then measured, as far as a server allows.

    All numbers go to results.sqlite in --out; the same command resumes a run that was stopped, and
    measures nothing twice. The report is one page, report.html. Under torchrun the processes
    share the methods, and the tokens of each text where one device can't hold --to.
    """
    from longitude.extension.api import estimate
    from longitude.extension.api import extend as run
    from longitude.training.distributed import is_first_process

    quiet = quiet or not is_first_process()
    with display(quiet, resumes=True) as progress:
        options = replace(options, progress=progress)
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


@o.takes(ProbeOptions)
def probe(
    options: ProbeOptions,
    urls: Annotated[
        list[str],
        Argument(
            metavar="URL [URL]",
            help="Of an OpenAI-compatible API, as in http://127.0.0.1:8000/v1; a second one should "
            "be its equal.",
        ),
    ],
    *,
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
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print how many requests and tokens at most; send none.")
    ] = False,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Find out what a server really does with a long prompt.

    Measures where input is cut off, and whether silently; how far questions are answered, by length
    and depth, and how fast; whether the same prompt gets the same answer; with --reference, which
    scheme is in force; with a second URL or --against, what differs. Ends with a verdict; the exit
    code is 1 if something is wrong.

    The prompts are generated text. Only the address given is called. The same command resumes a
    probe that was stopped.
    """
    from longitude.core.client import read_key
    from longitude.probing import api

    if len(urls) > 2 or (len(urls) == 2 and against):
        raise UserError(
            "probe takes one URL, one and --against, or two that should be equal: leave the others "
            "out."
        )
    if save:
        api.check_file(save)  # before any request
    key = read_key(key_file) if key_file else os.environ.get("LONGITUDE_API_KEY") or None
    with display(quiet, resumes=True) as progress:
        options = replace(options, key=key, progress=progress)
        if dry_run:
            return print_result(api.estimate(urls[0], options=options), as_json)
        result = api.probe(urls[0], urls[1] if len(urls) > 1 else against, options=options)
    if save:
        api.save(result, save)
    print_result(result, as_json)
    if not quiet:
        say(f"wrote {options.out}/report.html and probe.json.")
    if result.faults:
        raise Exit(1)


@o.takes(TrainOptions)
def train(
    options: TrainOptions,
    scheme: Annotated[str, Option(help="As in 'rope()' or 'layers(…)'.")] = "rope()",
    *,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train one decoder with a scheme, on bytes.

    Writes model.safetensors, config.json and, if stock transformers has a model that computes the
    same, a checkpoint for it in hf/. Stop it at any moment: --resume continues from the last
    checkpoint, bit for bit. Under torchrun each process takes its share of a batch.
    """
    from longitude.training import api

    with display(quiet or not api.is_first_process()) as progress:
        result = api.train(scheme, options=replace(options, progress=progress))
    if api.is_first_process():
        print_result(result, as_json)


@o.takes(LabOptions)
def lab(
    options: LabOptions,
    schemes: Annotated[
        str, Option(help="Schemes joined by ;, or all: every encoding that can be trained.")
    ] = "rope(); alibi()",
    *,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train each scheme on the same data, order, seed and steps; test each at every length.

    Rows go to rows.sqlite (and rows.jsonl) in --out; stored rows are not computed again. The table
    and the curves are printed and drawn into lab.html: the loss of the last half window of the same
    text with more and more context before it, and exact answers on the tasks.
    """
    from longitude.training import api

    with display(quiet or not api.is_first_process(), resumes=True) as progress:
        result = api.lab(schemes, options=replace(options, progress=progress))
    if api.is_first_process():
        print_result(result, as_json)
        if not quiet:
            say(f"wrote {options.out}/rows.jsonl and {options.out}/lab.html")


@o.takes(TuneOptions)
def tune(
    options: TuneOptions,
    model: o.Model = "tiny-rope",
    to: o.Target = None,
    *,
    quiet: o.Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Fine-tune a model briefly on longer positions, and measure what that changed.

    A recipe sets the scheme, the learning rate, the steps, the sequences, their positions and what
    is trained; any of it can be overridden. `longitude extend`'s measurements of the baseline, and
    of the scheme before and after training, go to report/report.html. The result is in model/:
    longitude.hf.load opens it, longitude export writes it for a runtime; an adapter carries its
    scheme with it.

    Stop it at any moment: the same command continues from the last checkpoint. It runs under
    `torchrun` and `accelerate launch` as well.
    """
    from longitude.training import api

    with display(quiet or not api.is_first_process(), resumes=True) as progress:
        result = api.tune(model, to=to, options=replace(options, progress=progress))
    if api.is_first_process():
        print_result(result, as_json)
        if not quiet:
            say(f"wrote {', '.join(map(str, result.files))}.")
