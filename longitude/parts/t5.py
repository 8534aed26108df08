"""T5's bias: one learned number per head for each bucket of distances.

Raffel et al. 2019, "Exploring the Limits of Transfer Learning" (arXiv:1910.10683). Half of the
buckets are exact distances, the rest are log-spaced up to `max_distance` and flat beyond;
`bidirectional` gives each side half of the buckets. T5 itself has no 1/√d on its scores: to run its
checkpoints pass `scale=1.0` to `attention`. Site ⑤: constant far away, so that only a narrow band
needs the bias.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from longitude.core.part import Bias, Dims, K, Q, Rows, Term, Weights, part, train_defaults
from longitude.core.validate import UserError
from longitude.parts.distance_bias import by_distance


def bucket(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each key behind (distance = i - j > 0) or ahead; float32 logarithms, as
    checkpoints use."""
    ahead = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        ahead, distance = (distance < 0).to(distance.dtype) * buckets, distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = buckets // 2
    large = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large = (exact + (large * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, large) + ahead


@part("t5", site="bias", paper="Raffel et al. 2019, arXiv:1910.10683")
class T5(Bias):
    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    integer_positions: ClassVar[bool] = True

    def check(self) -> None:
        each = self.buckets // 2 if self.bidirectional else self.buckets
        if each < 2 or self.buckets % (4 if self.bidirectional else 2):
            raise UserError(
                f"t5: {self.buckets} buckets can't be halved evenly: give a multiple of 4, 32 "
                f"is usual."
            )
        if self.max_distance <= each // 2:
            raise UserError(
                f"t5: max_distance must exceed {each // 2}, the exact buckets, but got "
                f"{self.max_distance}."
            )

    @property
    def flat_beyond(self) -> int | None:
        return self.max_distance

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.buckets, dims.heads, generator=rng) * 0.02}

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        table = weights["table"]

        def value(h: Tensor, r: Tensor) -> Tensor:
            return table[self.entry(r), h]

        return by_distance(q_pos, k_pos, value, rows=table)

    def entry(self, distance: Tensor) -> Tensor:
        """The row of the table at each distance."""
        steps = distance.round().to(torch.int64) if distance.is_floating_point() else distance
        return bucket(steps, self.buckets, self.max_distance, self.bidirectional)

    training = train_defaults
