"""A learned table read over and over: position t takes row t mod n.

Beltagy et al. 2020, "Longformer", start a table of 4,096 positions from eight copies of RoBERTa's
512 rows. Near tokens keep their trained differences except where two copies meet; a distance of n
can't be told from 0.
"""

import torch
from torch import Tensor

from longitude.part import Dims, Mistake, Places, Vectors, Weights, not_negative, part, positive


@part("learned_tiled", site="embed", paper="Beltagy et al. 2020, arXiv:2004.05150")
class LearnedTiled:
    length: int
    offset: int = 0
    reach = None  # it never ends

    def check(self) -> None:
        positive(self, "length")
        not_negative(self, "offset")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02}

    def rows(self, table: Tensor, pos: Tensor) -> Tensor:
        """The code of each position, from the weight table itself."""
        if pos.is_floating_point() or (pos.numel() and pos.min() < 0):
            raise Mistake(
                "learned_tiled: a table has rows for whole positions from 0 on: give such."
            )
        return table[pos % self.length + self.offset]

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + self.rows(weights["table"], pos).to(x.dtype)
