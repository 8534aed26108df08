"""Which positions a training sequence takes: in order, PoSE's skips, or sorted draws.

Each is a part of the library: `sequential()`, `pose(target, chunks)` (Zhu et al. 2023,
arXiv:2309.10400) and `randomized(target)` (Ruoss et al. 2023, arXiv:2305.16843). The last two train
positions up to the target on short sequences. Every row has a draw of its own, which follows from
the seed, the step and the row alone. In order, a document that is packed into a row begins at 0.
"""

from __future__ import annotations

import re

import torch
from jaxtyping import Int
from torch import Tensor

from longitude.fields import Mistake, shown
from longitude.lab.chance import generator
from longitude.part import Positions, as_tensor
from longitude.parts import Pose, Randomized, Sequential

CHUNKS = 2  # the paper's


def policy(written: str, target: int, length: int) -> Positions:
    """The part that a word asks for, sure to place `length` tokens below the target."""
    match = re.fullmatch(r"(order|randomized|pose)(?:\((\d+)\))?", written.strip())
    if match is None or (match[2] and match[1] != "pose"):
        raise Mistake(
            f"positions are taken in order, by pose or randomized, but got {shown(written)}: write "
            f"order, pose, pose(4) for four chunks, or randomized."
        )
    if match[1] == "order":
        return Sequential()
    made = Randomized(target) if match[1] == "randomized" else Pose(target, int(match[2] or CHUNKS))
    made.ids(length, rng=generator(0))  # what does not fit is told here
    return made


def drawn(part: Positions) -> bool:
    """Whether positions are drawn, and so don't tell where a document begins."""
    return not isinstance(part, Sequential)


def in_order(segments: Int[Tensor, "rows n"]) -> Int[Tensor, "rows n"]:
    """Positions that count from 0 in every document."""
    n = segments.shape[1]
    index = torch.arange(n).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def positions(
    part: Positions, segments: Int[Tensor, "rows n"], seed: int, step: int
) -> Int[Tensor, "rows n"]:
    """The positions of a step's rows; drawn ones run over a whole row."""
    if not drawn(part):
        return in_order(segments)
    rows, n = segments.shape
    rng = generator(seed, step, "positions")
    return torch.stack([as_tensor(part.ids(n, rng=rng)) for _ in range(rows)])
