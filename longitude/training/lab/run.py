"""One training run of the lab: the value that describes it, its batches, and its training.

A `Run` is everything that determines the trained weights, and nothing else. It is stored in
config.json and is part of the key of the lab's rows; two runs with equal values are the same run.

    config.json               the run
    model.safetensors         the weights; written last, so that a folder that has it is complete
    hf/                       the same weights for stock transformers, if it has such a model

A batch mixes windows of text and generated tasks by their shares. It is a pure function of the run
and the step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longitude import __version__
from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.training.checkpoint import RunFolder, gather_weights, write_file
from longitude.training.data import Corpus, join, windows
from longitude.training.distributed import World, distribute, generator
from longitude.training.lab.model import SIZES, Decoder, DecoderConfig, at_test, check_trainable
from longitude.training.lab.tasks import task
from longitude.training.loop import Batch, Job, LoopOptions, adamw, train
from longitude.training.options import RunOptions
from longitude.training.to_hf import stock_model, write_checkpoint

MODEL, STOCK = "model.safetensors", "hf"
DECAY = 0.1  # of matrices; gains, biases and the weights of parts do not decay
REPORT_SECONDS = 0.25  # between two reports; each one waits for the device
SYNC_STEPS = 10  # a lab model's step is short, compared with a broadcast


@dataclass(frozen=True)
class Run:
    """A model, its data, and how it is trained. `tasks` are names with their shares of a batch;
    `text` is the corpus's fingerprint; `batch` counts sequences over all processes."""

    config: DecoderConfig
    text: str
    steps: int
    batch: int
    rate: float
    seed: int = 0
    tasks: tuple[tuple[str, float], ...] = (("text", 1.0),)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rate"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise UserError(f"{name} must be finite and above zero, but got {value}.")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then a cosine down to a tenth."""
        warmup = min(200, self.steps // 10)
        if step < warmup:
            return self.rate * (step + 1) / (warmup + 1)
        done = (step - warmup) / max(1, self.steps - warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"shape": fields.pop("config"), **fields, "tasks": [list(t) for t in self.tasks]}


def read_run(data: dict[str, Any]) -> Run:
    shape, fields = DecoderConfig(**data["shape"]), {k: v for k, v in data.items() if k != "shape"}
    tasks = tuple((name, float(share)) for name, share in data["tasks"])
    return Run(**{**fields, "config": shape, "tasks": tasks})


def lab_folder(path: Path) -> RunFolder:
    return RunFolder(path, "config.json", "run", (MODEL,), lambda data: read_run(data).to_json())


def loop_options(options: RunOptions, name: str) -> LoopOptions:
    """Return how the loop saves and reports; `name` is the job's name in progress events."""
    return LoopOptions(
        deterministic=options.deterministic,
        save_seconds=options.every,
        sync_steps=SYNC_STEPS,
        report_seconds=REPORT_SECONDS,
        report=lambda step: options.progress(step.event(name)),
    )


def make_run(
    options: RunOptions, scheme: Scheme | Layers, seed: int, corpus: Corpus, world: World
) -> Run:
    """Build the run of a scheme; errors in scheme, tasks, text and processes are raised here."""
    config = decoder_config(scheme, options.length, options.size, options.block)
    check_trainable(scheme, options.length, config.layers)
    size = SIZES[options.size]
    run = Run(
        config,
        corpus.fingerprint,
        steps=size.steps if options.steps is None else options.steps,
        batch=size.batch if options.batch is None else options.batch,
        rate=size.rate if options.rate is None else options.rate,
        seed=seed,
        tasks=shares(options.tasks),
        dtype=world.dtype(options.dtype),
    )
    world.check_batch(run.batch)
    make_batch(run, join(corpus.train), 0)
    return run


def decoder_config(
    scheme: Scheme | Layers, length: int, size: str, block: str = "llama"
) -> DecoderConfig:
    """Return the config of a named size, with a norm after the embedding if it makes a BLOOM."""
    if size not in SIZES:
        raise UserError(f"no size is called {size!r}: use {', '.join(SIZES)}.")
    sizes, bloom = SIZES[size], stock_model(scheme, block)[0] == "bloom"
    widths = (sizes.layers, sizes.dim, sizes.heads, sizes.hidden(block))
    return DecoderConfig(dump(scheme), length, *widths, block, embed_norm=bloom)


def shares(text: str) -> tuple[tuple[str, float], ...]:
    """Parse tasks and their shares of a batch, as in "text:3,passkey"; a share is 1 by default."""
    tasks: dict[str, float] = {}
    for item in text.split(","):
        name, _, share = (part.strip() for part in item.partition(":"))
        try:
            tasks[name] = float(share or 1)
        except ValueError:
            raise UserError(f"--tasks: {share!r} is no number: write {name}:2.") from None
        if not name or not 0 < tasks[name] < math.inf:
            raise UserError(f"--tasks: {item!r} is no task with a share: write text:3,passkey:1.")
    return tuple(tasks.items())


def row_counts(batch: int, tasks: tuple[tuple[str, float], ...]) -> dict[str, int]:
    """Return each task's rows of a batch: its share, with the largest remainders rounded up."""
    total = sum(share for _, share in tasks)
    exact = {name: batch * share / total for name, share in tasks}
    counts = {name: int(rows) for name, rows in exact.items()}
    spare = batch - sum(counts.values())
    for name in sorted(counts, key=lambda name: counts[name] - exact[name])[:spare]:
        counts[name] += 1
    if empty := [name for name, rows in counts.items() if not rows]:
        raise UserError(
            f"a batch of {batch} sequences leaves none for {empty[0]}: make the batch larger."
        )
    return counts


def make_batch(run: Run, text: UInt8[Tensor, " n"], step: int) -> Batch:
    """Build the batch of a step, over all processes; `text` is the joined training text."""
    n, seed = run.config.length, run.seed
    tokens, weights = [], []
    for name, count in row_counts(run.batch, run.tasks).items():
        if name == "text":
            tokens.append(windows(text, n, count, seed, step))
            weights.append(torch.ones(count, n))
        else:
            rows = task(name, n).rows(generator(seed, step, name), count, n, vary=True)
            tokens.append(rows.tokens)
            weights.append(rows.weights)
    row, weight = torch.cat(tokens), torch.cat(weights)
    policy = parse(run.config.scheme).layer(0).positions
    pos = policy.ids(n, rng=generator(seed, step, "positions"))
    return Batch(row[:, :-1], row[:, 1:], weight, pos, float(weight.sum(dtype=torch.float64)))


def make_job(run: Run, corpus: Corpus, world: World, compiled: bool | None = False) -> Job:
    """Build a run's decoder, ready for the loop."""
    model, text = Decoder(run.config, run.seed).to(world.device), join(corpus.train)
    if world.device.type == "cuda" if compiled is None else compiled:
        torch.compiler.reset()  # a graph break in an earlier model's loop would affect this one
        model.compile()

    def decays(name: str, p: Tensor) -> bool:
        """Whether `p` is a matrix of a block or the embedding, and no weight of a part."""
        return p.dim() == 2 and ".at." not in name and not name.startswith("positions.")

    return Job(
        model=model,
        loss=distribute(model, world),
        optimizer=adamw(model, run.rate, DECAY, decays),
        batch=lambda step: make_batch(run, text, step),
        rate_at=run.rate_at,
        steps=run.steps,
        tokens=run.batch * run.config.length,
        seed=run.seed,
        dtype=run.dtype,
    )


def train_run(
    run: Run,
    corpus: Corpus,
    folder: RunFolder,
    world: World,
    options: LoopOptions = LoopOptions(),  # noqa: B008 (frozen)
    *,
    compiled: bool | None = False,
    weights_dtype: str = "float32",
) -> None:
    """Train a run to its end, from its folder's state if there is one, and write the results."""
    with folder.begin(run.to_json(), {"longitude": __version__, "text": corpus.name}, world):
        job = make_job(run, corpus, world, compiled)
        losses, last = train(job, folder, world, options)
        weights = gather_weights(job.model)
        if world.first:
            speed = round(last.tokens_per_second)
            with folder.finishing({"losses": losses.tolist(), "tokens_per_second": speed}):
                if stock_model(parse(run.config.scheme), run.config.block)[0] is not None:
                    write_checkpoint(folder.path / STOCK, run.config, weights, weights_dtype)
                meta = {"format": "pt"}
                write_file(
                    folder.path / MODEL, lambda part: save_file(weights, part, metadata=meta)
                )
    world.barrier()


def load(path: Path, scheme: str | None = None, device: str | torch.device = "cpu") -> Decoder:
    """Load a finished run's model with its test-time scheme, or with another one."""
    config = read_run(lab_folder(path).question() or {}).config
    scheme = scheme or dump(at_test(parse(config.scheme)))
    model = Decoder(replace(config, scheme=scheme))
    try:
        model.load_state_dict(load_file(path / MODEL))
    except SafetensorError as e:
        raise UserError(f"{path / MODEL} is damaged ({e}): delete it, and train again.") from e
    return model.to(device).eval()
