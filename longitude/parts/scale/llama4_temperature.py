"""Llama 4's temperature: 1 + scale · ln(1 + ⌊(pos + offset) / floor⌋).

Meta 2025, Llama 4, on its layers without positions. Ministral 3 uses the same with offset 0.
"""

import torch

from longitude.part import Dims, Factors, Rows, Weights, not_negative, part, positive


@part("llama4_temperature", site="scale", paper="Meta 2025, Llama 4; transformers modeling_llama4")
class Llama4Temperature:
    floor: int = 8192
    scale_by: float = 0.1
    offset: int = 1

    def check(self) -> None:
        positive(self, "floor")
        not_negative(self, "offset")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        steps = torch.floor((q_pos.to(torch.float64) + self.offset) / self.floor)
        return (1 + self.scale_by * torch.log1p(steps))[:, None]
