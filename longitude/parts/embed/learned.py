"""Learned absolute positions: x_t = E[token_t] + P[t], P a table of `length` rows.

Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; BERT, GPT-2. There is no row
past the table. `offset` skips rows that a checkpoint keeps for padding (RoBERTa, BART and OPT: 2).
"""

import torch
from torch import Tensor

from longitude.part import Dims, Mistake, Places, Vectors, Weights, not_negative, part, positive


def rows(name: str, table: Tensor, pos: Tensor, offset: int = 0) -> Tensor:
    """The table's rows at these positions, or a sentence about the one that is not there."""
    if pos.is_floating_point():
        raise Mistake(
            f"{name}: a table has no row for real-valued positions: use sinusoidal() or rope()."
        )
    held = table.shape[0] - offset
    if pos.numel() and not torch.compiler.is_compiling():
        low, high = torch.aminmax(pos)
        if low < 0 or high >= held:
            raise Mistake(
                f"{name}: position {int(high if high >= held else low)} is outside the table "
                f"of {held} positions: learned ones read on to {held**2} as hierarchical({held})."
            )
    return table[pos + offset]


@part("learned", site="embed", paper="Gehring et al. 2017, arXiv:1705.03122")
class Learned:
    length: int
    offset: int = 0

    def check(self) -> None:
        positive(self, "length")
        not_negative(self, "offset")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        table = torch.randn(self.length + self.offset, dims.dim, generator=rng) * 0.02
        return {"table": table}

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + rows("learned", weights["table"], pos, self.offset).to(x.dtype)
