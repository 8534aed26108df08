"""From what was asked for to a model that can be trained; every mistake is told here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longitude.core.part import Positions
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, shown
from longitude.eval.records import Subject
from longitude.extension.plan import describe, target_length
from longitude.hf.families.learned import resize_positions
from longitude.hf.loading import load
from longitude.hf.patch import apply, own_scheme, patched, scheme_of
from longitude.training.distributed import World
from longitude.training.tune.data import Stream, policy, stream
from longitude.training.tune.fsdp import check_rows
from longitude.training.tune.loss_model import Reader
from longitude.training.tune.options import Asked
from longitude.training.tune.params import check_possible, make_trainable
from longitude.training.tune.recipes import LORA, About, Recipe, named, settle
from longitude.training.tune.shifted_groups import grouped
from longitude.training.tune.train import Job

SET = ("scheme", "steps", "rows", "length", "rate", "warmup", "positions", "trained", "rank")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(eq=False)
class Prepared:
    """A question, and the model that it is asked of."""

    asked: Asked
    about: Subject
    target: int
    recipe: Recipe
    scheme: str  # in full, as the result will read
    dtype: str
    model: Any
    tokenizer: Any
    positions: Positions
    text: Stream
    grown: tuple[str, int] | None = None

    @property
    def question(self) -> dict[str, Any]:
        """All that decides what comes out, as it stands in tune.json."""
        about = {"model": self.about.name, "weights": self.about.weights, "target": self.target}
        more = {"text": self.text.fingerprint, "seed": self.asked.seed, "dtype": self.dtype}
        return {**about, "scheme": self.scheme, "recipe": self.recipe.plain(), **more}

    @property
    def group(self) -> int | None:
        """Tokens of one of LongLoRA's groups."""
        assert self.recipe.length is not None
        share = self.recipe.groups
        return None if share is None else 2 * round(share * self.recipe.length / 2)


def check(asked: Asked) -> None:
    """Raise for what can be told without a model."""
    if asked.recipe is not None:
        named(asked.recipe)
    if asked.scheme is not None:
        parse(asked.scheme)
    given = {name: getattr(asked, name) for name in SET if getattr(asked, name) is not None}
    Recipe("asked", "", "", **given)
    if asked.save_every < 1:
        raise UserError(f"--save-every counts steps from 1, but got {asked.save_every}: give more.")
    if asked.dtype not in DTYPES:
        raise UserError(f"--dtype is auto, float32 or bfloat16, but got {shown(asked.dtype)}.")
    if Path(asked.out).is_file():
        raise UserError(f"--out {asked.out} is a file: give a folder.")


def prepare(asked: Asked, world: World) -> Prepared:
    """Load the model, settle the recipe, read the text."""
    check(asked)
    dtype = asked.dtype
    if dtype == "auto":
        dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    model, tokenizer = loaded(asked, dtype, world)
    if tokenizer is None:
        raise UserError(f"{asked.model} has no tokenizer, and texts must be cut: add its files.")
    about = describe(model, asked.model, asked.revision)
    target = target_length(asked.to, about.trained)
    recipe = _recipe(asked, model, about, target)
    check_possible(recipe.trained)
    check_rows(recipe.rows, world)
    assert recipe.length is not None
    part = policy(recipe.positions, target, recipe.length)
    scheme = _full(model, recipe)
    text = stream(asked.text, tokenizer, part, recipe.length, _most(recipe), asked.seed)
    grown = (recipe.scheme or scheme, target) if about.family == "learned" else None
    made = Prepared(
        asked, about, target, recipe, scheme, dtype, model, tokenizer, part, text, grown
    )
    _check_groups(made)
    return made


def loaded(asked: Asked, dtype: str, world: World) -> tuple[Any, Any]:
    """The model and its tokenizer; one that is to be sharded waits on the CPU. It comes in float32
    unless it is sure that it stays frozen."""
    recipe = None if asked.recipe is None else named(asked.recipe)
    trained = asked.trained or (recipe.trained if recipe else None)
    return load(
        asked.model,
        device="cpu" if world.size > 1 else world.device,
        dtype=dtype if trained == LORA else "float32",
        revision=asked.revision,
        trust_remote_code=asked.trust_remote_code,
        quiet=asked.quiet or not world.first,
    )


def _recipe(asked: Asked, model: Any, about: Subject, target: int) -> Recipe:
    width = model.config.get_text_config().hidden_size
    own = own_scheme(model)
    known = About(asked.model, own, about.family, about.trained, target, width)
    recipe = settle(asked.recipe, known, {name: getattr(asked, name) for name in SET})
    if recipe.length is not None and recipe.length > target:
        raise UserError(
            f"sequences of {recipe.length:,} tokens reach past --to ({target:,}): give shorter "
            f"sequences or a farther target."
        )
    return recipe


def _full(model: Any, recipe: Recipe) -> str:
    """The scheme that the result reads with, tried on the model: what it can't have is told here.
    A table is written out longer, and then is the model's own."""
    if recipe.scheme is None:
        return dump(own_scheme(model))
    with patched(model, recipe.scheme, check=False):
        return dump(scheme_of(model))


def _check_groups(made: Prepared) -> None:
    if made.group is not None:
        grouped(parse(made.scheme), made.group)


def _most(recipe: Recipe) -> int:
    """Tokens that all steps together can see."""
    assert recipe.length is not None
    return recipe.steps * recipe.rows * (recipe.length + 1)


def ready(made: Prepared) -> tuple[Job, Any]:
    """What is trained, and the model that is saved in the end (peft's, with LoRA)."""
    model, recipe, seed = made.model, made.recipe, made.asked.seed
    if made.grown is not None:
        model = resize_positions(model, parse(made.grown[0]), made.grown[1]).to(model.device)
    elif made.group is not None:
        apply(model, grouped(parse(made.scheme), made.group))
    elif recipe.scheme is not None:
        apply(model, recipe.scheme)
    reader = Reader(model)  # which tries the model, while all its weights are of one type
    text = replace(made.text, apart=made.text.apart and reader.packs())
    if recipe.trained == LORA and made.dtype == "bfloat16":
        model.to(torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # LoRA's first matrices are drawn, in every process the same
        kept = make_trainable(model, recipe.trained, recipe.rank)
    return Job(reader, recipe, text, made.positions, seed, made.dtype), kept
