"""Fine-tuning, from the options to a folder that `longitude.hf.load` opens.

    tune.json                 the question, i.e. all settings: settled recipe, model, text, seed
    checkpoint.safetensors    trainable weights, optimizer and losses, while it trains
    training.json             the loss of every step, tokens per second, seconds
    training.png              the same as a chart
    model/                    the result: an adapter or a checkpoint
    report/                   measurements before and after (evaluate.py)

A run that was stopped at any step continues from its last state if the same question is given for
the same folder; another question is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from longitude import __version__
from longitude.core.progress import Event
from longitude.core.text import dump, parse
from longitude.core.validate import UserError, target_length
from longitude.eval.records import Subject
from longitude.hf.families.learned import resize_positions
from longitude.hf.loading import load, raise_window, without_weights
from longitude.hf.patch import apply, patched, scheme_of, undo
from longitude.hf.saving import save, save_adapter
from longitude.hf.source import find
from longitude.parts import Sequential
from longitude.training.checkpoint import RunFolder, gather_weights, trainable_parameters
from longitude.training.distributed import World, assign, distribute, process_group
from longitude.training.loop import SMOOTHED, Job, LoopOptions, Step, adamw, train
from longitude.training.loss import LossModel
from longitude.training.options import TuneOptions
from longitude.training.tune.context import (
    TOKENS_AT_ONCE,
    check_shareable,
    choose_context,
    split_for,
)
from longitude.training.tune.data import TokenStream, position_policy, token_stream
from longitude.training.tune.model import (
    LORA,
    check_peft,
    grouped_scheme,
    make_trainable,
    shifted_groups,
)
from longitude.training.tune.recipes import Recipe, recipe_of, settle

QUESTION, RESULT = "tune.json", "model"
RUNS = Path("runs")


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned model. `folder` opens with `longitude.hf.load`; `base` is the original model."""

    base: str
    out: str
    folder: str
    kind: str  # adapter or checkpoint
    recipe: dict[str, Any]  # as settled, with its paper
    scheme: str  # of the result, in full
    trained_to: int  # the base's window
    target: int
    steps: int
    loss: float  # mean of the last steps
    tokens_per_second: float
    seconds: float
    weights: dict[str, int] = field(default_factory=dict)  # trained, and all
    losses: tuple[float, ...] = ()
    ranks: int = 1  # processes that shared each sequence


@dataclass(frozen=True, eq=False)
class Prepared:
    """A settled question, with the loaded model and text."""

    options: TuneOptions
    world: World
    about: Subject
    target: int
    recipe: Recipe
    scheme: str  # of the result, in full
    dtype: str
    model: Any
    tokenizer: Any
    text: TokenStream
    length: int  # of a sequence
    resized: tuple[str, int] | None = None  # scheme and length of a longer table of positions
    split: str = "tokens"  # how --context-parallel splits attention

    @property
    def question(self) -> dict[str, Any]:
        """Everything that determines the result, as stored in tune.json."""
        about = {"model": self.about.name, "weights": self.about.weights, "target": self.target}
        data = {"text": self.text.fingerprint, "seed": self.options.seed, "dtype": self.dtype}
        return {**about, "scheme": self.scheme, "recipe": self.recipe.to_json(), **data}

    @property
    def group(self) -> int | None:
        """The size of LongLoRA's groups in tokens, if the recipe has them."""
        share = self.recipe.groups
        return None if share is None else 2 * round(share * self.length / 2)


def tune_folder(path: Path) -> RunFolder:
    """Return the folder of a run; the result's config is written last, and completes it."""
    results = (f"{RESULT}/config.json", f"{RESULT}/adapter_config.json")
    return RunFolder(path, QUESTION, "question", results)


def with_recommendation(model: str, to: str, options: TuneOptions) -> tuple[TuneOptions, str]:
    """If neither scheme nor recipe is given, add the scheme that an `extend` run of this model and
    target in runs/ found better than the baseline. Return the options, and a sentence if so."""
    from longitude.runtimes.export import is_run, read_run
    from longitude.runtimes.files import slug

    if options.scheme is not None or options.recipe is not None:
        return options, ""
    trained, _ = without_weights(
        model, revision=options.revision, trust_remote_code=options.trust_remote_code
    )
    folder = RUNS / f"{slug(model)}-{target_length(to, trained or 1)}"
    if not trained or not is_run(str(folder)):
        return options, ""
    try:
        advice = read_run(str(folder))
    except UserError:  # incomplete, or of several models: use the recipe's scheme
        return options, ""
    if advice.context is None or advice.name != model:
        return options, ""
    scheme = str(advice.context["scheme"])
    note = f"using the scheme that {folder} recommends: {scheme}"
    return replace(options, scheme=scheme), note


def prepare(model: str, to: str, options: TuneOptions, world: World) -> Prepared:
    """Load the model, settle the recipe, read the text; every error in them is raised here."""
    from longitude.extension.plan import TargetModel
    from longitude.runtimes.target import head_size

    if find(model, options.revision).adapter is not None and options.lora is not False:
        raise UserError(
            f"{model} is an adapter, and another can't be trained on top of it: merge it first "
            f"(longitude export {model}), or train it --full."
        )
    dtype = world.dtype(options.dtype)
    loaded, tokenizer = _load(model, options, dtype, world)
    about = TargetModel.of(loaded, tokenizer, model, options.revision).subject
    target = target_length(to, about.trained)
    width = loaded.config.get_text_config().hidden_size
    sizes = {"head_dim": head_size(loaded.config.to_dict())} if about.family == "rope" else {}
    recipe = settle(options.recipe, about, width, target, options.overrides, **sizes)
    length = recipe.length or target
    if length > target:
        raise UserError(
            f"sequences of {length:,} tokens reach past --to ({target:,}): give shorter "
            f"sequences or a farther target."
        )
    check_peft(recipe.trained)
    if options.context_parallel is None and about.family == "rope":
        checkpointing = _checkpoints(options, world)
        context, sentence = choose_context(loaded, recipe, length, dtype, checkpointing, world)
        world = world.shared_by(world.broadcast(context))
        if sentence and world.first:
            options.progress(Event(sentence, 0, 0))
    world.check_batch(recipe.rows)
    check_shareable(recipe, about.family, length, world)
    policy = position_policy(recipe.positions, target, length, about.trained)
    scheme = about.scheme
    if recipe.scheme is not None:  # raises for parts that the model can't have
        with patched(loaded, recipe.scheme, check=False):
            scheme = dump(scheme_of(loaded))
    by, config = options.context_parallel_by, loaded.config.get_text_config()
    split = split_for(config, parse(scheme), dtype, by, world, options.progress)
    max_tokens = recipe.steps * recipe.rows * (length + 1)  # at most, of all steps together
    text = token_stream(options.text, tokenizer, policy, length, max_tokens, options.seed)
    if recipe.short:  # mixed windows: documents are separated in the short ones
        text = replace(text, packed=True, short=(recipe.short, min(about.trained, length)))
    resized = (recipe.scheme or scheme, target) if about.family == "learned" else None
    settled = (options, world, about, target, recipe, scheme, dtype)
    prepared = Prepared(*settled, loaded, tokenizer, text, length, resized, split)
    if prepared.group is not None:
        grouped_scheme(parse(scheme), prepared.group)
    return prepared


def _load(name: str, options: TuneOptions, dtype: str, world: World) -> tuple[Any, Any]:
    """Load the model and its tokenizer. A model to be sharded stays on the CPU; it is loaded in
    float32 unless its weights are certain to stay frozen."""
    trained = options.overrides.get("trained") or (
        options.recipe and recipe_of(options.recipe).trained
    )
    device = "cpu" if world.size > 1 else world.device
    kwargs: dict[str, Any] = {"device": device, "dtype": dtype if trained == LORA else "float32"}
    return load(name, quiet=True, **options.loading | kwargs)


def make_trainable_model(prepared: Prepared) -> tuple[LossModel, TokenStream, Any]:
    """Return the model under its scheme with trainable weights in float32, the text to train on,
    and the model to save in the end (with LoRA, peft's)."""
    model, recipe = prepared.model, prepared.recipe
    if prepared.resized is not None:
        scheme, length = prepared.resized
        model = resize_positions(model, parse(scheme), length).to(model.device)
    elif prepared.group is not None:
        apply(model, grouped_scheme(parse(prepared.scheme), prepared.group))
    elif recipe.scheme is not None:
        apply(model, recipe.scheme)
    # LossModel probes the model while all its weights are of one type
    loss = LossModel(model, drawn=not isinstance(prepared.text.policy, Sequential))
    text = replace(prepared.text, packed=prepared.text.packed and loss.separates_documents())
    if recipe.trained == LORA and prepared.dtype == "bfloat16":
        model.to(torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(prepared.options.seed)  # LoRA's A: the same in every process
        saved = make_trainable(model, recipe.trained, recipe.rank)
    return loss, text, saved


def fine_tune(
    model: str, to: str, options: TuneOptions, report: Callable[[Step], None] = lambda step: None
) -> Tuned:
    """Train, from the folder's state if it has one; the first process reports each step."""
    context = options.context_parallel
    with process_group(options.device, 1 if context is None else context) as world:
        prepared, folder = prepare(model, to, options, world), tune_folder(options.folder(model))
        world = prepared.world
        folder.claim(prepared.question, options.resume)
        about = {"longitude": __version__, "text": prepared.text.name}
        with folder.begin(prepared.question, about, world):
            if not folder.done:
                _train(prepared, folder, report)
        world.barrier()
    history = folder.history()
    losses = history.pop("losses")
    last = losses[-SMOOTHED:]
    return Tuned(
        base=model,
        out=str(folder.path),
        folder=str(folder.path / RESULT),
        kind="adapter" if prepared.recipe.trained == LORA else "checkpoint",
        recipe=prepared.recipe.to_json(),
        scheme=prepared.scheme,
        trained_to=prepared.about.trained,
        target=prepared.target,
        steps=len(losses),
        loss=sum(last) / len(last),
        losses=tuple(losses),
        ranks=world.context,
        **history,
    )


def _train(prepared: Prepared, folder: RunFolder, report: Callable[[Step], None]) -> None:
    """Train to the last step and write the result; the papers train without weight decay."""
    loss, text, saved = make_trainable_model(prepared)
    model, options, recipe = loss.model, prepared.options, prepared.recipe
    world, length = prepared.world, prepared.length
    if _checkpoints(options, world):
        # the name since transformers 5.23, or the one before
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if world.context > 1:
        loss.spread(world.group, prepared.scheme, prepared.split)
    trained = sum(p.numel() for _, p in trainable_parameters(model))
    counts = {"trained": trained, "all": sum(p.numel() for p in model.parameters())}
    distribute(loss, world, shard=True)
    job = Job(
        model=model,
        loss=loss.train(),
        optimizer=adamw(model, recipe.rate),
        batch=lambda step: text.batch(recipe.rows, length, options.seed, step),
        rate_at=recipe.rate_at,
        steps=recipe.steps,
        tokens=recipe.rows * length,
        seed=options.seed,
        dtype=prepared.dtype,
        tokens_at_once=TOKENS_AT_ONCE,
    )
    loop = LoopOptions(save_steps=options.save_every, report=report)
    with shifted_groups(model, prepared.group) if prepared.group else nullcontext():
        losses, last = train(job, folder, world, loop)
    weights = gather_weights(model) if world.size > 1 else None
    if world.first:
        history = {
            "losses": losses.tolist(),
            "tokens_per_second": round(last.tokens_per_second, 1),
            "seconds": round(last.seconds, 1),
            "weights": counts,
        }
        with folder.finishing(history):
            if weights is not None:
                single = World(torch.device("cpu"))  # loaded again, unsharded
                unsharded, _ = _load(prepared.about.name, options, prepared.dtype, single)
                loss, _, saved = make_trainable_model(replace(prepared, model=unsharded))
                for name, p in trainable_parameters(loss.model):
                    assign(p, weights[name])
            _save(prepared, loss, saved, folder.path / RESULT)


def _checkpoints(options: TuneOptions, world: World) -> bool:
    """Whether to use gradient checkpointing, which computes layers twice to save memory."""
    on_cuda = world.device.type == "cuda"
    return on_cuda if options.checkpointing is None else options.checkpointing


def _save(prepared: Prepared, loss: LossModel, saved: Any, folder: Path) -> None:
    """Write the result with its final scheme."""
    model, target = loss.model.eval(), prepared.target
    if prepared.group is not None:
        undo(model)
        apply(model, prepared.scheme)  # full attention, without groups
    if prepared.recipe.trained == LORA:
        about = {"revision": prepared.options.revision, "target": target}
        return save_adapter(saved, folder, prepared.about.name, **about, grown=prepared.resized)
    raise_window(model.config, target)
    tokenizer = prepared.tokenizer  # vLLM reads no more than its maximum length
    tokenizer.model_max_length = max(target, tokenizer.model_max_length)
    save(model.to(getattr(torch, prepared.dtype)), folder, tokenizer, target=target)
