"""From what a user asks for to a run: every mistake is found here, before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from longitude.core.scheme import Layers, Scheme
from longitude.core.text import dump
from longitude.core.validate import UserError
from longitude.training.distributed import World
from longitude.training.lab.batch import Batches
from longitude.training.lab.config import SIZES, Shape, shape
from longitude.training.lab.pipeline import home
from longitude.training.lab.run import DTYPES, Run, shares
from longitude.training.lab.text import Corpus, windows
from longitude.training.lab.trainable import check_trainable
from longitude.training.loop import Manner, Progress


@dataclass(frozen=True)
class Asked:
    """A user's wishes, apart from the scheme and the seed; None takes what suits the size."""

    length: int = 256
    size: str = "tiny"
    block: str = "llama"
    tasks: str = "text"
    steps: int | None = None
    batch: int | None = None
    rate: float | None = None
    dtype: str = "auto"

    def run(self, scheme: Scheme | Layers, seed: int, corpus: Corpus, world: World) -> Run:
        """The run of a scheme, checked whole: its scheme, its tasks, its text, its processes."""
        made = self.shape(scheme)
        check_trainable(scheme, self.length, made.layers)
        named = SIZES[self.size]
        run = Run(
            made,
            corpus.fingerprint,
            steps=named.steps if self.steps is None else self.steps,
            batch=named.batch if self.batch is None else self.batch,
            rate=named.rate if self.rate is None else self.rate,
            seed=seed,
            tasks=shares(self.tasks),
            dtype=_dtype(self.dtype, world.device),
        )
        Batches(run, windows(corpus, self.length), world.rank, world.size).at(0)
        return run

    def shape(self, scheme: Scheme | Layers) -> Shape:
        """The shape, with BLOOM's norm behind the embedding where BLOOM is the model's home."""
        found = shape(dump(scheme), self.length, self.size, self.block)
        return replace(found, embed_norm=home(found).kind == "bloom")


@dataclass(frozen=True)
class How:
    """Where a run computes and what it keeps on the way, which is no part of what the run is."""

    device: str = "auto"
    every: float = 60.0
    deterministic: bool = False
    compiled: bool | None = None

    def manner(self, world: World, watch: Callable[[Progress], None]) -> Manner:
        """For the training loop; compiled on CUDA unless something else is asked for."""
        fast = world.device.type == "cuda" if self.compiled is None else self.compiled
        return Manner(fast, self.deterministic, self.every, watch)


def _dtype(asked: str, device: torch.device) -> str:
    if asked == "auto":
        return "bfloat16" if device.type == "cuda" else "float32"
    if asked not in DTYPES:
        raise UserError(
            f"--dtype is auto, float32 or bfloat16, but got {asked!r}: use one of them."
        )
    return asked
