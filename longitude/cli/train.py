"""`longitude train` and `lab`: one small decoder trained with one scheme; and schemes trained short
on the same data, and tested long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from longitude.cli import options as o
from longitude.cli.output import print_result, say
from longitude.cli.progress import display
from longitude.core.validate import UserError


def train(
    scheme: Annotated[str, Option(help="As in 'rope()' or 'layers(…)'.")] = "rope()",
    length: o.Length = 256,
    size: o.Size = "tiny",
    block: Annotated[
        str, Option(help="llama (RMSNorm, SwiGLU) or gpt (LayerNorm, GELU, biases).")
    ] = "llama",
    text: o.Text = None,
    tasks: Annotated[
        str, Option(help="What a batch is made of, with shares: text:3,passkey:1.")
    ] = "text",
    steps: o.Steps = None,
    batch: o.Batch = None,
    rate: o.Rate = None,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    seed: Annotated[int, Option(help="Of weights, data and positions.")] = 0,
    out: Annotated[Path | None, Option(help="The run's folder; runs/… if not given.")] = None,
    every: o.Every = 60.0,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run.")] = False,
    deterministic: o.Deterministic = False,
    compile: o.Compile = None,
    weights: Annotated[
        str, Option(help="Type of the weights in hf/: float32 or bfloat16.")
    ] = "float32",
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train one decoder with a scheme, on bytes.

    Writes model.safetensors, config.json and, if stock transformers has a model that computes the
    same, a checkpoint for it in hf/. Stop it at any moment: --resume continues from the last
    checkpoint, bit for bit. Under torchrun each process takes its share of a batch.
    """
    given = {k: v for k, v in locals().items() if k not in ("scheme", "text", "as_json", "quiet")}
    from longitude.training import api

    with display(quiet or not api.is_first_process()) as progress:
        options = api.TrainOptions(**given, text=tuple(text or ()), progress=progress)
        result = api.train(scheme, options=options)
    if api.is_first_process():
        print_result(result, as_json)


def lab(
    schemes: Annotated[
        str, Option(help="Schemes joined by ;, or all: every encoding that can be trained.")
    ] = "rope(); alibi()",
    length: o.Length = 256,
    test: Annotated[
        str | None, Option(help="Lengths to test at; without, 1 to 16 windows.")
    ] = None,
    tasks: Annotated[
        str, Option(help="What to train and test on: text,passkey,copy:2 …, with shares.")
    ] = "text",
    size: o.Size = "nano",
    text: o.Text = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    rate: o.Rate = None,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    seeds: Annotated[str, Option(help="As in 0,1,2.")] = "0",
    out: Annotated[Path, Option(help="Folder of rows, runs, table and chart.")] = Path("runs/lab"),
    excerpts: Annotated[int, Option(help="Test excerpts of text.")] = 16,
    problems: Annotated[int, Option(help="Test problems of each other task.")] = 64,
    every: o.Every = 60.0,
    deterministic: o.Deterministic = False,
    compile: o.Compile = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train each scheme on the same data, order, seed and steps; test each at every length.

    Rows go to rows.sqlite (and rows.jsonl) in --out; stored rows are not computed again. The table
    and the curves are printed and drawn into lab.html: loss of the last half window of the same
    text with more and more context before it, and exact answers on the tasks.
    """
    given = {k: v for k, v in locals().items() if k not in ("schemes", "as_json", "quiet")}
    from longitude.training import api

    given |= {"text": tuple(text or ())}
    given |= {name: _integers(name, given[name]) for name in ("test", "seeds")}
    with display(quiet or not api.is_first_process()) as progress:
        result = api.lab(schemes, options=api.LabOptions(**given, progress=progress))
    if api.is_first_process():
        print_result(result, as_json)
        if not quiet:
            say(f"wrote {out / 'rows.jsonl'} and {out / 'lab.html'}")


def _integers(name: str, text: str | None) -> tuple[int, ...]:
    """Integers, each once, in rising order."""
    try:
        return tuple(sorted({int(item) for item in text.split(",")})) if text else ()
    except ValueError:
        raise UserError(f"--{name} takes whole numbers, but got {text!r}: write 256,512.") from None
