"""`longitude train`: one small decoder, trained with one scheme."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from longitude.training.checkpoint import Folder
    from longitude.training.lab.options import Asked, How


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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that stopped.")
    ] = False,
    deterministic: o.Deterministic = False,
    compiled: o.Compile = None,
    weights: Annotated[
        str, typer.Option(help="Type of the weights in hf/: float32 or bfloat16.")
    ] = "float32",
    as_json: o.Json = False,
) -> None:
    """Train one decoder with a scheme, on bytes.

    Leaves model.safetensors, config.json and, where stock transformers has a model that computes
    the same, a checkpoint for it in hf/. Stop it at any moment: --resume goes on from the last
    checkpoint as if nothing had happened. Under torchrun each process takes its share of a batch.
    """
    from longitude.training.lab.options import Asked, How

    asked = Asked(length, size, block, tasks, steps, batch, rate, dtype)
    how = How(device, every, deterministic, compiled)
    folder = _trained(asked, how, scheme, seed, text, out, resume, weights)
    if folder is not None:
        _outcome(folder, as_json)


def _trained(
    asked: Asked,
    how: How,
    scheme: str,
    seed: int,
    text: list[str] | None,
    out: Path | None,
    resume: bool,
    weights: str,
) -> Folder | None:
    """The folder of the finished run, for the one process that speaks."""
    from longitude.cli.output import say
    from longitude.cli.progress import bar
    from longitude.core.text import parse
    from longitude.training.checkpoint import Folder
    from longitude.training.distributed import joined
    from longitude.training.lab.compare import slug
    from longitude.training.lab.pipeline import check_kept, home, trained
    from longitude.training.lab.text import gather
    from longitude.training.loop import Stopped

    written = parse(scheme)
    check_kept(weights)
    with joined(how.device) as world:
        corpus = gather(text)
        run = asked.run(written, seed, corpus, world)
        folder = Folder(out or Path("runs") / slug(run))
        folder.claim(run, resume)
        if world.first:
            say(home(run.shape).why)
        with bar(world.first) as shown:
            shown.start(run.shape.scheme)
            try:
                if not folder.done:
                    trained(run, corpus, folder, world, how.manner(world, shown.tell), weights)
            except Stopped as stop:
                if world.first:
                    say(f"stopped after step {stop} of {run.steps}: add --resume to go on.")
                raise typer.Exit(130) from None
        return folder if world.first else None


def _outcome(folder: Folder, as_json: bool) -> None:
    import json

    from longitude.cli.output import print_json, say
    from longitude.training.checkpoint import HISTORY

    history = json.loads((folder.path / HISTORY).read_text(encoding="utf-8"))
    hf = folder.path / "hf"
    last = history["losses"][-20:]
    found = {
        "out": str(folder.path),
        "hf": str(hf) if hf.is_dir() else None,
        "steps": len(history["losses"]),
        "loss": sum(last) / len(last),
        "tokens_per_second": history["tokens_per_second"],
    }
    if as_json:
        return print_json(found)
    say(
        f"{folder.path}: loss {found['loss']:.3f} after {found['steps']} steps, "
        f"{found['tokens_per_second']:,} tokens a second."
        + (f" transformers loads {hf}." if found["hf"] else "")
    )
