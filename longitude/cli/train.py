"""`longitude train`, `lab` and `tune`: one small decoder trained with one scheme; schemes trained
short on the same data and tested long; and a short fine-tune that adapts a checkpoint."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from typer import Option

from longitude.cli import common as o
from longitude.cli.common import display, print_result, say

RECIPES = tomllib.loads(
    (Path(__file__).parents[1] / "training" / "tune" / "recipes.toml").read_text(encoding="utf-8")
)
RECIPES_HELP = " ".join(f"{name}: {r['what']} ({r['paper']})." for name, r in RECIPES.items())


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
    given = o.without(locals(), "scheme", "text", "as_json", "quiet")
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
    given = o.without(locals(), "schemes", "as_json", "quiet")
    from longitude.training import api

    given |= {"text": tuple(text or ())}
    given |= {name: o.integers(name, given[name]) for name in ("test", "seeds")}
    with display(quiet or not api.is_first_process()) as progress:
        result = api.lab(schemes, options=api.LabOptions(**given, progress=progress))
    if api.is_first_process():
        print_result(result, as_json)
        if not quiet:
            say(f"wrote {out / 'rows.jsonl'} and {out / 'lab.html'}")


def tune(
    model: o.Model = "tiny-rope",
    to: o.Target = None,
    recipe: Annotated[
        str | None,
        Option(help=f"{RECIPES_HELP} [default: yarn, alibi or learned, by the model's positions]"),
    ] = None,
    scheme: Annotated[
        str | None,
        Option(
            help='As in "rope(frequencies=yarn(4, original=8192))". [default: the recipe\'s own; '
            "without --recipe what an earlier `longitude extend` of this model and target "
            "recommends]"
        ),
    ] = None,
    text: o.Text = None,
    test: Annotated[
        list[str] | None,
        Option(
            help="Texts to measure on, given as --text is. [default: the tenth of --text that "
            "training never sees]"
        ),
    ] = None,
    steps: Annotated[int | None, Option(help="[default: the recipe's]")] = None,
    batch: Annotated[
        int | None, Option(help="Sequences a step, over all processes. [default: the recipe's]")
    ] = None,
    seq: Annotated[
        int | None,
        Option(
            help="Tokens of a training sequence. [default: the target, or with drawn positions the "
            "trained window]"
        ),
    ] = None,
    lr: Annotated[
        float | None,
        Option(help="The highest learning rate. [default: the recipe's, for the width]"),
    ] = None,
    warmup: Annotated[
        int | None, Option(help="Steps in which the rate rises. [default: the recipe's]")
    ] = None,
    positions: Annotated[
        str | None,
        Option(
            help="order, pose, pose(3) with three chunks, randomized, e2_llm, cream or "
            "random_steps. [default: the recipe's]"
        ),
    ] = None,
    lora: Annotated[
        bool | None,
        Option(
            "--lora/--full",
            help="Train LoRA's matrices, embeddings and norms (an adapter comes out), or all "
            "weights (a checkpoint). [default: the recipe's]",
        ),
    ] = None,
    rank: Annotated[
        int | None, Option(help="Of LoRA's matrices. [default: the recipe's, 16]")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder of the run. [default: runs/NAME-RECIPE, or NAME-tuned]")
    ] = None,
    resume: Annotated[bool, Option(help="Continue an interrupted run in --out.")] = True,
    save_every: Annotated[int, Option(help="Steps between two checkpoints.")] = 50,
    context_parallel: Annotated[
        int | None,
        Option(
            help="Processes under torchrun that share the tokens of a sequence. [default: the "
            "fewest whose memory holds a step]"
        ),
    ] = None,
    context_parallel_by: Annotated[
        str,
        Option(
            help="tokens (a ring of keys), heads (Ulysses, where heads divide), or auto: what "
            "sends fewer bytes."
        ),
    ] = "tokens",
    checkpointing: Annotated[
        bool | None,
        Option(
            "--checkpointing/--no-checkpointing",
            help="Compute activations twice to hold them once. [default: on an accelerator]",
        ),
    ] = None,
    measure: Annotated[
        bool, Option(help="Measure baseline, before and after, as `longitude extend` does.")
    ] = True,
    docs: Annotated[int, Option(help="Documents to measure on.")] = 4,
    tasks: Annotated[
        str, Option(help="What to measure, joined by commas, as `extend` has it; or none.")
    ] = "kept_context,passkey",
    questions: Annotated[
        int | None, Option(help="Prompts of a family at each length. [default: 2]")
    ] = None,
    report_to: Annotated[
        str | None,
        Option(help="tensorboard, trackio or wandb, if it is installed. [default: none]"),
    ] = None,
    device: o.ModelDevice = "auto",
    dtype: Annotated[
        str, Option(help="auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16.")
    ] = "auto",
    revision: o.Revision = None,
    trust_remote_code: o.Trust = False,
    seed: Annotated[int, Option(help="Of data, positions, documents and questions.")] = 0,
    quiet: o.Quiet = False,
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
    given = o.without(locals(), "model", "to", "quiet", "as_json")
    from longitude.training import api

    given |= {"text": tuple(text or ()), "test": tuple(test or ()), "tasks": o.names(tasks)}
    with display(quiet or not api.is_first_process()) as progress:
        result = api.tune(model, to=to, options=api.TuneOptions(**given, progress=progress))
    if api.is_first_process():
        print_result(result, as_json)
        if not quiet:
            say(f"wrote {', '.join(map(str, result.files))}.")
