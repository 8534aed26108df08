"""Recipes: how long-context checkpoints were trained, each with its paper.

recipes.toml lists them: a scheme for the extension from the trained length L to the target T, and
the training settings. Learning rates are the papers', for models of width 4,096; `settle` scales
them to another width as 1/width (Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466) and, for
LoRA, by ten (Schulman et al. 2025, "LoRA Without Regret"). The papers' batches have 64 to 128
sequences; the ones here fit one machine. Every field can be overridden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from longitude.core.lengths import Lengths
from longitude.core.text import parse
from longitude.core.validate import UserError, shown
from longitude.eval.records import Subject
from longitude.parts import LongRope, Rope
from longitude.training import options
from longitude.training.tune.model import FULL, LORA

PAPERS_WIDTH = 4096  # model width that the papers' learning rates are for
LORA_RATE = 10  # times the rate of full training
OWN = "own scheme"  # the recipe's name if a scheme is given and no recipe
OPTIONS = {  # from fields to the names of the command's options
    "scheme": "scheme", "steps": "steps", "rows": "batch", "length": "seq", "rate": "lr",
    "warmup": "warmup", "positions": "positions", "rank": "rank",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, and how. `scheme` has slots, which `settle` fills for a model; None
    keeps the model's scheme. `length` None is the target, or with `at_window` the trained length;
    `groups` is the size of LongLoRA's groups as a share of a sequence, `short` the share of steps
    on windows of the trained length."""

    name: str
    paper: str
    family: str  # rope, alibi or learned
    scheme: str | None = None
    steps: int = 400
    rows: int = 8
    length: int | None = None
    rate: float = 2e-5
    warmup: int = 20
    positions: str = "order"
    trained: str = LORA
    rank: int = 16
    groups: float | None = None
    at_window: bool = False
    short: float = 0.0
    what: str = ""  # for the help

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "length", "rate", "rank"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(
                    f"--{OPTIONS[name]} must be above zero, but got {value}: give more."
                )
        if self.warmup < 0:
            raise UserError(
                f"--warmup must not be negative, but got {self.warmup}: give 0 or more."
            )
        if self.trained not in (LORA, FULL):
            raise UserError(f"what is trained is lora or full, but got {shown(self.trained)}.")

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "what"}

    def rate_at(self, step: int) -> float:
        """Return a step's learning rate: linear from a tenth up, then linear down to a tenth."""
        if step < self.warmup:
            return self.rate * (0.1 + 0.9 * step / self.warmup)
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (1 - 0.9 * done)


def _longrope2(s: Lengths, rope: Rope, pairs: int) -> LongRope:
    """For texts beyond the window, frequencies from the critical pair on are divided by s, those
    before it by NTK's s^(i / critical); within it nothing changes. The critical pair is the first
    without a full rotation within L. The paper's search (`extend --search`) yields an earlier one,
    25 instead of 31 for Phi-3-mini. The paper gives no attention factor, so there is none here."""
    turns = max(math.e, s.trained / (2 * math.pi))
    critical = min(pairs, math.ceil(pairs * math.log(turns) / math.log(float(rope.base))))
    long = tuple(round(s.factor() ** min(1.0, i / critical), 6) for i in range(pairs))
    short = (1.0,) * pairs
    return LongRope(short, long, original=s.trained, factor=s.factor(), attention_factor=1.0)


def _critical_base(s: Lengths, rope: Rope, pairs: int) -> int | float:
    """Return the critical base of the target, rounded up to two digits: from it on, the last pair
    with a full rotation within L has a period of T or more."""
    turns = [max(math.e, n / (2 * math.pi)) for n in (s.trained, s.target)]
    critical = float(rope.base) ** max(1.0, math.log(turns[1]) / math.log(turns[0]))
    digit = 10 ** (math.floor(math.log10(critical)) - 1)
    return math.ceil(critical / digit) * digit


COMPUTED = {"longrope2": _longrope2, "critical_base": _critical_base}  # slots of a recipe's scheme
RECIPES = {name: Recipe(name, **entry) for name, entry in options.RECIPES.items()}
USUAL = {"rope": "yarn", "alibi": "alibi", "learned": "learned"}


def recipe_of(name: str) -> Recipe:
    """Return the recipe of a name, before it is settled for a model."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        hint = f"{near[0]} is near" if near else f"use {', '.join(RECIPES)}"
        raise UserError(f"no recipe is called {shown(name)}: {hint}.")
    return RECIPES[name]


def settle(
    name: str | None,
    model: Subject,
    width: int,
    target: int,
    given: Mapping[str, Any],
    head_dim: int = 128,
) -> Recipe:
    """Return a recipe for a model: its scheme filled in for the lengths, its rate scaled to the
    width, and then the fields in `given` replaced."""
    from longitude.extension.candidates import full_layers

    model_scheme = parse(model.scheme)
    recipe = recipe_of(name or USUAL.get(model.family, "yarn"))
    if recipe.family != model.family:
        fitting = [n for n, entry in RECIPES.items() if entry.family == model.family]
        instead = f"use {' or '.join(fitting)}" if fitting else "give a model with positions"
        raise UserError(
            f"recipe {recipe.name} is for models with {recipe.family} positions, but {model.name} "
            f"has {shown(model_scheme)}: {instead}."
        )
    if target <= model.trained:
        raise UserError(
            f"--to is {target:,} tokens, but {model.name} was trained to {model.trained:,}: it "
            f"already covers that; give a greater --to, for example {4 * model.trained}."
        )
    rope = next((entry.rotary for entry in model_scheme.schemes if entry.rotary), Rope())
    lengths, text = Lengths(model.trained, target), recipe.scheme
    if text is not None:
        slots: dict[str, Any] = {"trained": model.trained, "factor": f"{lengths.factor():g}"}
        for slot, compute in COMPUTED.items():
            if f"{{{slot}}}" in text:
                slots[slot] = compute(lengths, rope, rope.dim(head_dim) // 2)
        text = text.format(**slots)
    policies = {recipe.positions, given.get("positions", recipe.positions)}
    lora = given.get("trained", recipe.trained) == LORA
    if "rank" in given and not lora:
        raise UserError(
            f"--rank applies to LoRA only, but got {given['rank']} where all weights are trained: "
            f"leave it out, or add --lora."
        )
    settled = replace(
        recipe,
        scheme=text and full_layers(text, model_scheme),
        rate=recipe.rate * PAPERS_WIDTH / width * (LORA_RATE if lora else 1),
        length=target if policies == {"order"} and not recipe.at_window else model.trained,
        warmup=min(recipe.warmup, max(0, given.get("steps", recipe.steps)) // 10),
    )
    if name is None and "scheme" in given:  # trained as usual, but with no paper's scheme
        settled = replace(settled, name=OWN, paper="")
    return replace(settled, **given)
