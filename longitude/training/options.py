"""What `train`, `lab` and `tune` take, each option once (see longitude/options.py)."""

from __future__ import annotations

import tomllib
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from longitude.core.progress import Progress, silent
from longitude.core.validate import UserError, shown
from longitude.options import TEXT, ModelOptions, option

RECIPES = tomllib.loads(
    (Path(__file__).parent / "tune" / "recipes.toml").read_text(encoding="utf-8")
)
RECIPES_HELP = " ".join(f"{name}: {r['what']} ({r['paper']})." for name, r in RECIPES.items())
SPLITS = ("tokens", "heads", "auto")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `train` and `lab` share; None takes what suits the size."""

    length: int = option(256, "Tokens (bytes) in a training window.")
    size: str = option("tiny", "nano, tiny, small or 125m.")
    block: str = option("llama", "llama (RMSNorm, SwiGLU) or gpt (LayerNorm, GELU, biases).")
    text: tuple[str, ...] = option((), TEXT)
    tasks: str = option("text", "What a batch is made of, with shares: text:3,passkey:1.")
    steps: int | None = option(None, "As suits the size if not given.")
    batch: int | None = option(None, "Sequences a step, over all processes.")
    rate: float | None = option(None, "The highest learning rate.")
    device: str = option("auto", "auto, cpu or cuda.")
    dtype: str = option("auto", "auto (bfloat16 on CUDA), float32 or bfloat16.")
    every: float = option(60.0, "Seconds between two checkpoints.")
    deterministic: bool = option(False, "Bit for bit on CUDA too, at a price.")
    compile: bool | None = option(None, "torch.compile; by default on CUDA.")
    progress: Progress = silent


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `train`."""

    seed: int = option(0, "Of weights, data and positions.")
    out: Path | str | None = option(None, "The run's folder; runs/… if not given.")
    resume: bool = option(False, "Continue an interrupted run.")
    weights: str = option("float32", "Type of the weights in hf/: float32 or bfloat16.")


@dataclass(frozen=True, kw_only=True)
class LabOptions(RunOptions):
    """Options of `lab`."""

    size: str = option("nano", "nano, tiny, small or 125m.")
    block: str = "llama"
    test: tuple[int, ...] = option((), "Lengths to test at; without, 1 to 16 windows.")
    tasks: str = option("text", "What to train and test on: text,passkey,copy:2 …, with shares.")
    seeds: tuple[int, ...] = option((0,), "As in 0,1,2.")
    out: Path | str = option(Path("runs/lab"), "Folder of rows, runs, table and chart.")
    excerpts: int = option(16, "Test excerpts of text.")
    problems: int = option(64, "Test problems of each other task.")

    def __post_init__(self) -> None:
        for name in ("excerpts", "problems"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} must be at least 1, but got {getattr(self, name)}.")


@dataclass(frozen=True)
class TuneOptions(ModelOptions):
    """Options of `tune`. None takes the recipe's own; no recipe takes the usual one of the model's
    kind of positions, or the scheme that an earlier `extend` run recommends."""

    recipe: str | None = option(
        None, f"{RECIPES_HELP} [default: yarn, alibi or learned, by the model's positions]"
    )
    scheme: str | None = option(
        None,
        'As in "rope(frequencies=yarn(4, original=8192))". [default: the recipe\'s own; without '
        "--recipe what an earlier `longitude extend` of this model and target recommends]",
    )
    text: tuple[str, ...] = option((), TEXT)
    test: tuple[str, ...] = option(
        (),
        "Texts to measure on, given as --text is. [default: the tenth of --text that training "
        "never sees]",
    )
    steps: int | None = option(None, "[default: the recipe's]")
    batch: int | None = option(
        None, "Sequences a step, over all processes. [default: the recipe's]"
    )
    seq: int | None = option(
        None,
        "Tokens of a training sequence. [default: the target, or with drawn positions the trained "
        "window]",
    )
    lr: float | None = option(
        None, "The highest learning rate. [default: the recipe's, for the width]"
    )
    warmup: int | None = option(None, "Steps in which the rate rises. [default: the recipe's]")
    positions: str | None = option(
        None,
        "order, pose, pose(3) with three chunks, randomized, e2_llm, cream or random_steps. "
        "[default: the recipe's]",
    )
    lora: bool | None = option(
        None,
        "Train LoRA's matrices, embeddings and norms (an adapter comes out), or all weights (a "
        "checkpoint). [default: the recipe's]",
        "--lora/--full",
    )
    rank: int | None = option(None, "Of LoRA's matrices. [default: the recipe's, 16]")
    out: Path | str | None = option(
        None, "Folder of the run. [default: runs/NAME-RECIPE, or NAME-tuned]"
    )
    resume: bool = option(True, "Continue an interrupted run in --out.")
    save_every: int = option(50, "Steps between two checkpoints.")
    context_parallel: int | None = option(
        None,
        "Processes under torchrun that share the tokens of a sequence. [default: the fewest whose "
        "memory holds a step]",
    )
    context_parallel_by: str = option(
        "tokens",
        "tokens (a ring of keys), heads (Ulysses, where heads divide), or auto: what sends fewer "
        "bytes.",
    )
    checkpointing: bool | None = option(
        None, "Compute activations twice to hold them once. [default: on an accelerator]"
    )
    measure: bool = option(True, "Measure baseline, before and after, as `longitude extend` does.")
    docs: int = option(4, "Documents to measure on.")
    tasks: tuple[str, ...] = option(
        ("kept_context", "passkey"),
        "What to measure, joined by commas, as `extend` has it; or none.",
        joined=True,
    )
    questions: int | None = option(None, "Prompts of a family at each length. [default: 2]")
    lengths: tuple[int, ...] = ()
    report_to: str | None = option(
        None, "tensorboard, trackio or wandb, if it is installed. [default: none]"
    )
    _: KW_ONLY
    dtype: str = option("auto", "auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16.")
    seed: int = option(0, "Of data, positions, documents and questions.")
    progress: Progress = silent

    def __post_init__(self) -> None:
        """Raise for mistakes that show without the model."""
        from longitude.core.text import parse
        from longitude.training.loop import check_logger
        from longitude.training.tune.recipes import Recipe, named

        if self.recipe is not None:
            named(self.recipe)
        if self.scheme is not None:
            parse(self.scheme)
        Recipe("given", "", "", **self.overrides)
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
        """What replaces a recipe's own fields, under their names."""
        from longitude.training.tune.recipes import FULL, LORA, OPTIONS

        given = {name: getattr(self, option) for name, option in OPTIONS.items()}
        given["trained"] = {None: None, True: LORA, False: FULL}[self.lora]
        return {name: value for name, value in given.items() if value is not None}

    def folder(self, model: str) -> Path:
        from longitude.runtimes.files import slug

        return Path(self.out or f"runs/{slug(model)}-{slug(self.recipe or 'tuned')}")
