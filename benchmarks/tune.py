"""A training step of `longitude tune` beside HF Trainer's with SDPA: tokens per second, memory.

    python -m benchmarks.tune [--lengths 8192,32768] [--device cuda] [--layers 30] [--rounds 3]

The shape is SmolLM2-135M's and the weights are random. Both train all weights, in float32 with
matrix products in bfloat16 on a GPU, by fused AdamW, with equally many rows per step. Trainer runs
transformers' own YaRN; ours runs YaRN and leaky ReRoPE, which transformers lacks. They take turns
of a few steps each; the first step of a turn is not counted. Each comparison is a line of JSON,
which docs/scripts/tune.py reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.suites.model import SHAPE
from longitude.hf.patch import apply
from longitude.parts import Sequential
from longitude.training.distributed import World
from longitude.training.loop import Job, adamw, take_step
from longitude.training.loss import LossModel
from longitude.training.tune.data import TokenStream
from longitude.training.tune.model import FULL, make_trainable
from longitude.training.tune.run import TOKENS_AT_ONCE

TRAINER = "HF Trainer, SDPA, YaRN"
WHOLE = {**SHAPE, "vocab_size": 49152, "tie_word_embeddings": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
SCHEMES = ("rope(frequencies=yarn(4, original=8192))", "rope(remap=leaky_rerope(4096, 8))")
Turn = Callable[[], list[float]]  # runs some steps, and returns the seconds of each


def main() -> None:
    """Time every scheme and Trainer at every length, in turns."""
    args = options().parse_args()
    for length in args.lengths:
        makers: dict[str, Callable[[], Turn]] = {TRAINER: lambda n=length: trainer(n, args)}
        makers |= {s: lambda s=s, n=length: ours(s, n, args) for s in args.schemes}
        peaks = {name: peak(make, args.device) for name, make in makers.items()}
        ways = {name: make() for name, make in makers.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, turn in ways.items():
                times[name].append(median(turn()[1:]))
        for scheme in args.schemes:
            print(json.dumps(row(scheme, length, times, peaks, args)), flush=True)
        del ways


def row(
    scheme: str,
    length: int,
    times: dict[str, list[float]],
    peaks: dict[str, int | None],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return one comparison as a row of the page; its ratio is the median over turns."""
    tokens = rows_at(length, args) * length
    ratio = median(b / a for a, b in zip(times[scheme], times[TRAINER], strict=True))
    theirs = tokens / median(times[TRAINER])
    layers = "layers run again" if args.checkpointing else "layers kept"
    return {
        "kind": "step",
        "model": f"SmolLM2-135M's shape, {args.layers} layers, {layers}",
        "scheme": scheme,
        "length": length,
        "tokens_per_second": round(ratio * theirs, 1),
        "trainer_tokens_per_second": round(theirs, 1),
        "peak": peaks[scheme],
        "trainer_peak": peaks[TRAINER],
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
    }


def rows_at(length: int, args: argparse.Namespace) -> int:
    """Return the number of sequences per step, which go through the model together."""
    return max(1, args.tokens // length)


def build(args: argparse.Namespace, rope: dict[str, Any] | None = None) -> Any:
    """Build the model in float32; `rope` updates its RoPE parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**WHOLE, num_hidden_layers=args.layers)
    config.use_cache = False
    if rope is not None:
        config.rope_parameters = {**(config.rope_parameters or {}), **rope}
    return LlamaForCausalLM(config).to(args.device).train()


def ours(scheme: str, length: int, args: argparse.Namespace) -> Turn:
    """Return a turn of steps as `longitude tune` takes them."""
    model = build(args)
    apply(model, scheme)
    loss = LossModel(model)
    make_trainable(model, FULL, 16)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = rows_at(length, args)
    tokens = _tokens(8 * rows * length)
    text = TokenStream(tokens, torch.zeros_like(tokens), "random", "", Sequential(), packed=False)
    job = Job(
        model=model,
        loss=loss,
        optimizer=adamw(model, 1e-4),
        batch=lambda step: text.batch(rows, length, 0, step),
        rate_at=lambda step: 1e-4,
        steps=1000,
        tokens=rows * length,
        seed=0,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        tokens_at_once=TOKENS_AT_ONCE,
    )
    world = World(torch.device(args.device))

    def turn() -> list[float]:
        taken = []
        for step in range(args.steps):
            begun = time.perf_counter()
            float(take_step(job, step, world))  # float() waits for the device
            taken.append(time.perf_counter() - begun)
        return taken

    return turn


def trainer(length: int, args: argparse.Namespace) -> Turn:
    """Return a turn of steps as Trainer takes them."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.taken: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if args.device == "cuda":
                torch.cuda.synchronize()
            self.taken.append(time.perf_counter() - self.begun)

    rows, clock = rows_at(length, args), Clock()
    tokens = _tokens(8 * rows * length).long().view(-1, length)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows,
        max_steps=args.steps,
        learning_rate=1e-4,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        gradient_checkpointing=args.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_torch_fused",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": t, "labels": t} for t in tokens]
    hf_trainer = Trainer(build(args, YARN), arguments, train_dataset=data, callbacks=[clock])  # type: ignore[arg-type]
    hf_trainer.remove_callback(PrinterCallback)

    def turn() -> list[float]:
        clock.taken.clear()
        hf_trainer.train()
        return list(clock.taken)

    return turn


def peak(make: Callable[[], Turn], device: str) -> int | None:
    """Return the peak bytes of a model, its optimizer and a turn, alone on the device."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make()()
    return torch.cuda.max_memory_allocated() - before


def _tokens(count: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(WHOLE["vocab_size"], (count,), generator=rng, dtype=torch.int32)


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=_sizes, default=[8192, 32768])
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=TOKENS_AT_ONCE, help="of a step")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--checkpointing", action="store_true", help="layers run again, in both")
    return parser


def _sizes(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


if __name__ == "__main__":
    main()
