"""Multiplicative positions: x_t ⊗ (1 + p_t), p a learned table.

Su 2021, "Transformer position encodings that rack researchers' brains" (kexue.fm 8130) names the
idea, x_t ⊗ p_t; writing it as 1 + p makes a table of zeros the identity, so that training can start
from any model.
"""

import torch

from longitude.part import Dims, Places, Vectors, Weights, part, positive
from longitude.parts.embed.learned import rows


@part("multiplicative", site="embed", paper="Su 2021, kexue.fm/archives/8130")
class Multiplicative:
    length: int

    def check(self) -> None:
        positive(self, "length")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"table": torch.zeros(self.length, dims.dim)}

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x * (1 + rows("multiplicative", weights["table"], pos)).to(x.dtype)
