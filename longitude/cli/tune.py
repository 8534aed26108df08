"""`longitude tune`: a short fine-tune that adapts a checkpoint to an extension."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longitude.cli import options as o

RECIPES = (
    "yarn: YaRN's scaling, 400 steps (Peng et al. 2023, arXiv:2309.00071). "
    "pi: position interpolation, 1,000 steps (Chen et al. 2023, arXiv:2306.15595). "
    "abf: a larger base, all weights (Rozière et al. 2023, Code Llama, arXiv:2308.12950). "
    "pose: far positions on short sequences (Zhu et al. 2023, arXiv:2309.10400). "
    "longlora: attention in shifted groups while it trains (Chen et al. 2023, arXiv:2309.12307). "
    "alibi: ALiBi on longer text, all weights (Press et al. 2021, arXiv:2108.12409; MPT-7B-"
    "StoryWriter). "
    "learned: a table of positions grown hierarchically, then trained (Su 2020, kexue.fm 7947). "
    "[default: yarn, alibi or learned, as the model has positions]"
)

To = Annotated[
    str | None,
    typer.Option(
        help="Target length: 32768, 32k, or 4x the trained window. [default: 4x; 8x for tiny-rope]"
    ),
]
RecipeName = Annotated[str | None, typer.Option("--recipe", help=RECIPES)]
SchemeText = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        help='As in "rope(frequencies=yarn(4, original=8192))". [default: the recipe\'s own; '
        "without --recipe what an earlier `longitude extend` of this model and target recommends]",
    ),
]
Test = Annotated[
    list[str] | None,
    typer.Option(
        "--test",
        help="Texts to measure on, given as --text is. [default: the tenth of --text that training "
        "never sees]",
    ),
]
Steps = Annotated[int | None, typer.Option(help="[default: the recipe's]")]
Batch = Annotated[
    int | None, typer.Option(help="Sequences a step, over all processes. [default: the recipe's]")
]
Seq = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a training sequence. [default: the target, or with drawn positions the "
        "trained window]"
    ),
]
Rate = Annotated[
    float | None,
    typer.Option("--lr", help="The highest learning rate. [default: the recipe's, for the width]"),
]
Warmup = Annotated[
    int | None, typer.Option(help="Steps in which the rate rises. [default: the recipe's]")
]
PositionPolicy = Annotated[
    str | None,
    typer.Option(
        "--positions",
        help="order, pose, pose(3) with three chunks, or randomized. [default: the recipe's]",
    ),
]
Lora = Annotated[
    bool | None,
    typer.Option(
        "--lora/--full",
        help="Train LoRA's matrices, embeddings and norms (an adapter comes out), or all weights "
        "(a checkpoint). [default: the recipe's]",
    ),
]
Rank = Annotated[int | None, typer.Option(help="Of LoRA's matrices. [default: the recipe's, 16]")]
Out = Annotated[
    Path | None, typer.Option(help="Folder of the run. [default: runs/NAME-RECIPE, or NAME-tuned]")
]
Resume = Annotated[
    bool,
    typer.Option("--resume/--no-resume", help="Continue an interrupted run in --out."),
]
SaveEvery = Annotated[int, typer.Option("--save-every", help="Steps between two checkpoints.")]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        help="Compute activations twice to hold them once. [default: on an accelerator]",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Measure baseline, before and after, as `longitude extend` does.",
    ),
]
Docs = Annotated[int, typer.Option(help="Documents to measure on.")]
Tasks = Annotated[str, typer.Option(help="Questions to ask: passkey, keys, variables; or none.")]
Questions = Annotated[
    int | None, typer.Option(help="In each cell of length and depth. [default: 4, and 2 on a CPU]")
]
ReportTo = Annotated[
    str | None,
    typer.Option(
        "--report-to", help="tensorboard, trackio or wandb, if it is installed. [default: none]"
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
DType = Annotated[
    str, typer.Option(help="auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16.")
]
Seed = Annotated[int, typer.Option(help="Of data, positions, documents and questions.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but the result.")]


def tune(
    model: o.Model = "tiny-rope",
    to: To = None,
    recipe: RecipeName = None,
    scheme: SchemeText = None,
    text: o.Text = None,
    test: Test = None,
    steps: Steps = None,
    batch: Batch = None,
    seq: Seq = None,
    lr: Rate = None,
    warmup: Warmup = None,
    positions: PositionPolicy = None,
    lora: Lora = None,
    rank: Rank = None,
    out: Out = None,
    resume: Resume = True,
    save_every: SaveEvery = 50,
    checkpointing: Checkpointing = None,
    measure: Measure = True,
    docs: Docs = 4,
    tasks: Tasks = "passkey",
    questions: Questions = None,
    report_to: ReportTo = None,
    device: Device = "auto",
    dtype: DType = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: o.Json = False,
) -> None:
    """Train a model a little on longer positions, and measure what that changed.

    A recipe sets the scheme, the learning rate, the steps, the sequences, their positions and what
    is trained; any of it can be overridden. Then the same measurements as `longitude extend` takes,
    of the baseline, before and after training, in report/report.html. The result lies in model/:
    longitude.hf.load opens it, longitude export writes it for a runtime; an adapter carries its
    scheme with it.

    Stop it at any moment: the same command continues from the last checkpoint. It runs under
    `torchrun` and `accelerate launch` as well.
    """
    given = {k: v for k, v in locals().items() if k not in ("model", "to", "quiet", "as_json")}
    from longitude.cli.output import print_result, say
    from longitude.cli.progress import display
    from longitude.training.api import TuneOptions, is_first_process
    from longitude.training.api import tune as run

    names = () if tasks == "none" else tuple(t.strip() for t in tasks.split(",") if t.strip())
    given |= {"text": tuple(text or ()), "test": tuple(test or ()), "tasks": names}
    with display(quiet or not is_first_process()) as progress:
        result = run(model, to=to, options=TuneOptions(**given, progress=progress))
    if is_first_process():
        print_result(result, as_json)
        if not quiet:
            say(f"wrote {', '.join(map(str, result.files))}.")
