"""`longitude train`: one small decoder, trained with one scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o


def train(
    scheme: Annotated[str, typer.Option(help="As in 'rope()' or 'layers(…)'.")] = "rope()",
    length: o.Length = 256,
    size: o.Size = "tiny",
    block: o.Block = "llama",
    text: o.Text = None,
    tasks: Annotated[
        str, typer.Option(help="What a batch is made of, with shares: text:3,passkey:1.")
    ] = "text",
    steps: o.Steps = None,
    batch: o.Batch = None,
    rate: o.Rate = None,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, data and positions.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/… if not given.")] = None,
    every: o.Every = 60.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    deterministic: o.Deterministic = False,
    compile: o.Compile = None,
    weights: Annotated[
        str, typer.Option(help="Type of the weights in hf/: float32 or bfloat16.")
    ] = "float32",
    as_json: o.Json = False,
) -> None:
    """Train one decoder with a scheme, on bytes.

    Writes model.safetensors, config.json and, if stock transformers has a model that computes the
    same, a checkpoint for it in hf/. Stop it at any moment: --resume continues from the last
    checkpoint, bit for bit. Under torchrun each process takes its share of a batch.
    """
    given = {k: v for k, v in locals().items() if k not in ("scheme", "text", "as_json")}
    from longitude.cli.output import print_result
    from longitude.cli.progress import display
    from longitude.training.api import TrainOptions, is_first_process
    from longitude.training.api import train as run

    with display(quiet=not is_first_process()) as progress:
        options = TrainOptions(**given, text=tuple(text or ()), progress=progress)
        result = run(scheme, options=options)
    if is_first_process():
        print_result(result, as_json)
