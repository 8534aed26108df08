"""The options of `longitude tune`, each with its help."""

from pathlib import Path
from typing import Annotated

import typer

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
        "without --recipe what an earlier `longitude extend` of this model and target advises]",
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
Policy = Annotated[
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
    typer.Option(
        "--resume/--no-resume", help="Go on where --out holds a stopped run of the same question."
    ),
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
        help="Measure as it is, before and after, as `longitude extend` does.",
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
Quiet = Annotated[bool, typer.Option("--quiet", help="Say nothing but the outcome.")]
