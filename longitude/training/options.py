"""Options of `train`, `lab` and `tune`, each defined once (see longitude/options.py)."""

from __future__ import annotations

import tomllib
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from longitude.core.progress import Progress, silent
from longitude.core.validate import UserError, shown
from longitude.options import TEXT, ModelOptions, Options, option

RECIPES = tomllib.loads(
    (Path(__file__).parent / "tune" / "recipes.toml").read_text(encoding="utf-8")
)
RECIPES_HELP = " ".join(f"{name}: {r['what']} ({r['paper']})." for name, r in RECIPES.items())
SPLITS = ("tokens", "heads", "auto")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """Options that `train` and `lab` share; None takes the default of the model size."""

    length: int = option("Tokens (bytes) in a training window.", 256)
    size: str = option("nano, tiny, small or 125m.", "tiny")
    block: str = option("llama (RMSNorm, SwiGLU) or gpt (LayerNorm, GELU, biases).", "llama")
    text: tuple[str, ...] = option(TEXT, ())
    tasks: str = option("What a batch is made of, with shares: text:3,passkey:1.", "text")
    steps: int | None = option("Training steps. [default: by --size]")
    batch: int | None = option("Sequences a step, over all processes.")
    rate: float | None = option("The highest learning rate.")
    device: str = option("auto, cpu or cuda.", "auto")
    dtype: str = option("auto (bfloat16 on CUDA), float32 or bfloat16.", "auto")
    every: float = option("Seconds between two checkpoints.", 60.0)
    deterministic: bool = option("Bitwise reproducible on CUDA too; slower.", False)
    compile: bool | None = option("Use torch.compile. [default: on CUDA]")
    progress: Progress = silent

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.every >= 0:  # refuses NaN too, which would never save
            raise UserError(f"--every takes seconds, 0 or more, but got {self.every}.")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `train`."""

    seed: int = option("Random seed for weights, data and positions.", 0)
    out: Path | str | None = option("Folder of the run. [default: a new one in runs/]")
    resume: bool = option("Continue an interrupted run.", False)
    weights: str = option("Type of the weights in hf/: float32 or bfloat16.", "float32")


@dataclass(frozen=True, kw_only=True)
class LabOptions(RunOptions):
    """Options of `lab`."""

    size: str = option("nano, tiny, small or 125m.", "nano")
    block: str = "llama"
    test: tuple[int, ...] = option("Lengths to test at. [default: 1 to 16 windows]", ())
    tasks: str = option("What to train and test on: text,passkey,copy:2 …, with shares.", "text")
    seeds: tuple[int, ...] = option("Random seeds, as in 0,1,2.", (0,))
    out: Path | str = option("Folder of rows, runs, table and chart.", Path("runs/lab"))
    excerpts: int = option("Test excerpts of text.", 16)
    problems: int = option("Test problems of each other task.", 64)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("excerpts", "problems"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, but got {getattr(self, name)}.")


@dataclass(frozen=True)
class TuneOptions(ModelOptions):
    """Options of `tune`. None takes the recipe's value. Without a recipe, the usual one for the
    model's position encoding applies, with the scheme that an earlier `extend` run recommends."""

    recipe: str | None = option(
        f"{RECIPES_HELP} [default: yarn, alibi or learned, by the model's positions]"
    )
    scheme: str | None = option(
        'Scheme, as in "rope(frequencies=yarn(4, original=8192))". [default: the recipe\'s; '
        "without --recipe what an earlier `longitude extend` of this model and target recommends]"
    )
    text: tuple[str, ...] = option(TEXT, ())
    test: tuple[str, ...] = option(
        "Texts to measure on, given as --text is. [default: the tenth of --text that training "
        "never sees]",
        (),
    )
    steps: int | None = option("Training steps. [default: the recipe's]")
    batch: int | None = option("Sequences a step, over all processes. [default: the recipe's]")
    seq: int | None = option(
        "Tokens of a training sequence. [default: the target, or with drawn positions the trained "
        "window]"
    )
    lr: float | None = option("The highest learning rate. [default: the recipe's, for the width]")
    warmup: int | None = option("Steps in which the rate rises. [default: the recipe's]")
    positions: str | None = option(
        "Positions in training: order, pose, pose(3) with three chunks, randomized, e2_llm, cream "
        "or random_steps. [default: the recipe's]"
    )
    lora: bool | None = option(
        "Train LoRA's matrices, embeddings and norms (an adapter comes out), or all weights (a "
        "checkpoint). [default: the recipe's]",
        flag="--lora/--full",
    )
    rank: int | None = option("Rank of LoRA's matrices. [default: the recipe's, 16]")
    out: Path | str | None = option("Folder of the run. [default: runs/NAME-RECIPE, or NAME-tuned]")
    resume: bool = option("Continue an interrupted run in --out.", True)
    save_every: int = option("Steps between two checkpoints.", 50)
    context_parallel: int | None = option(
        "Processes under torchrun that share the tokens of a sequence. [default: the fewest whose "
        "memory holds a step]"
    )
    context_parallel_by: str = option(
        "tokens (a ring of keys), heads (Ulysses, where heads divide), or auto: what sends fewer "
        "bytes.",
        "tokens",
    )
    checkpointing: bool | None = option(
        "Gradient checkpointing: recompute activations. [default: on an accelerator]"
    )
    measure: bool = option("Measure baseline, before and after, as `longitude extend` does.", True)
    docs: int = option("Documents to measure on.", 4)
    tasks: tuple[str, ...] = option(
        "What to measure, joined by commas, as `extend` has it; or none.",
        ("kept_context", "passkey"),
        joined=True,
    )
    questions: int | None = option("Prompts of a family at each length. [default: 2]")
    lengths: tuple[int, ...] = ()
    report_to: str | None = option(
        "tensorboard, trackio or wandb, if it is installed. [default: none]"
    )
    _: KW_ONLY
    dtype: str = option("auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16.", "auto")
    seed: int = option("Random seed for data, positions, documents and questions.", 0)
    progress: Progress = silent

    def __post_init__(self) -> None:
        """Raise for errors that can be detected without the model."""
        from longitude.core.text import parse
        from longitude.training.loop import check_logger
        from longitude.training.tune.recipes import Recipe, recipe_of

        super().__post_init__()
        if self.recipe is not None:
            recipe_of(self.recipe)
        if self.scheme is not None:
            parse(self.scheme)
        Recipe("given", "", "", **self.overrides)
        if self.lora is False and self.rank is not None:
            raise UserError(
                f"--rank applies to LoRA only, but got --full and {self.rank}: leave one out."
            )
        if self.save_every < 1:
            raise UserError(
                f"--save-every counts steps from 1, but got {self.save_every}: give more."
            )
        if self.context_parallel_by not in SPLITS:
            raise UserError(
                f"--context-parallel-by is {', '.join(SPLITS)}, but got "
                f"{shown(self.context_parallel_by)}: use one of them."
            )
        check_logger(self.report_to)

    @property
    def overrides(self) -> dict[str, Any]:
        """Values that replace fields of the recipe, by the field's name."""
        from longitude.training.tune.recipes import FULL, LORA, OPTIONS

        values = {name: getattr(self, option) for name, option in OPTIONS.items()}
        values["trained"] = {None: None, True: LORA, False: FULL}[self.lora]
        return {name: value for name, value in values.items() if value is not None}

    def folder(self, model: str) -> Path:
        from longitude.runtimes.files import slug

        return Path(self.out or f"runs/{slug(model)}-{slug(self.recipe or 'tuned')}")
