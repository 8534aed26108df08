"""What a training step sees: windows of text and generated tasks, mixed by their shares.

A batch is a pure function of the run and the step. Each process makes its own rows of it; sums
over the whole batch need no messages, because any process can make the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longitude.core.part import Pos
from longitude.core.text import parse
from longitude.core.validate import UserError
from longitude.training.distributed import generator
from longitude.training.lab.run import Run
from longitude.training.lab.tasks import task
from longitude.training.lab.text import Stream


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows of a step's batch, their positions, and the weight of all its rows together."""

    tokens: Int[Tensor, "rows n"]
    targets: Int[Tensor, "rows n"]
    weights: Float[Tensor, "rows n"]
    pos: Pos
    total: float

    def to(self, device: torch.device) -> Batch:
        """The same on a device; a range of positions stays a range."""
        parts = [_moved(x, device) for x in (self.tokens, self.targets, self.weights)]
        pos = self.pos if isinstance(self.pos, range) else _moved(self.pos, device)
        return Batch(*parts, pos=pos, total=self.total)


class Batches:
    """The batches of a run, by step; `rank` of `size` processes takes every size-th row."""

    def __init__(self, run: Run, stream: Stream | None, rank: int = 0, size: int = 1) -> None:
        self.run, self.stream, self.rows = run, stream, slice(rank, None, size)
        self.counts = counts(run.batch, run.tasks)
        self.positions = parse(run.shape.scheme).layer(0).positions
        if run.batch % size:
            raise UserError(
                f"a batch of {run.batch} sequences does not divide among {size} processes: "
                f"make it a multiple of {size}."
            )

    def at(self, step: int) -> Batch:
        """The batch of one step."""
        n, seed = self.run.shape.length, self.run.seed
        made = [self._rows(name, step, count) for name, count in self.counts.items()]
        tokens, weights = (torch.cat(parts) for parts in zip(*made, strict=True))
        pos = self.positions.ids(n, rng=generator(seed, step, "positions"))
        mine = tokens[self.rows]
        total = float(weights.sum(dtype=torch.float64))
        return Batch(mine[:, :-1], mine[:, 1:], weights[self.rows], pos, total)

    def _rows(self, name: str, step: int, count: int) -> tuple[Tensor, Tensor]:
        n, seed = self.run.shape.length, self.run.seed
        if name == "text":
            assert self.stream is not None
            return self.stream.batch(seed, step, count, n), torch.ones(count, n)
        rows = task(name, n).rows(generator(seed, step, name), count, n, vary=True)
        return rows.tokens, rows.weights


def counts(batch: int, tasks: tuple[tuple[str, float], ...]) -> dict[str, int]:
    """How many rows of a batch each task gets: its share, the largest remainders rounded up."""
    total = sum(share for _, share in tasks)
    exact = {name: batch * share / total for name, share in tasks}
    found = {name: int(rows) for name, rows in exact.items()}
    left = sorted(found, key=lambda name: found[name] - exact[name])[: batch - sum(found.values())]
    found = {name: rows + (name in left) for name, rows in found.items()}
    if empty := [name for name, rows in found.items() if not rows]:
        raise UserError(
            f"a batch of {batch} sequences leaves none for {empty[0]}: make the batch larger."
        )
    return found


def _moved(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
