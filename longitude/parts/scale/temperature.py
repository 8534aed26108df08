"""A constant temperature: logits divided by t.

Hinton et al. 2015. YaRN's own temperature is part of `yarn`; this one is for trying others.
"""

import torch

from longitude.part import Dims, Factors, Rows, Weights, part, positive


@part("temperature", site="scale", paper="Hinton et al. 2015, arXiv:1503.02531")
class Temperature:
    t: float

    def check(self) -> None:
        positive(self, "t")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        return torch.full((1, 1, 1), 1 / self.t, dtype=torch.float64, device=q_pos.device)
