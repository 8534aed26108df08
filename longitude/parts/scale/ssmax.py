"""Scalable softmax: logits × s_h ln n, n the number of keys a query may see, s_h learned for each
head.

Nakanishi 2025, "Scalable-Softmax Is Superior for Attention". The paper's fits lie near s = 0.43,
where s starts.
"""

import torch

from longitude.part import Dims, Factors, Rows, Weights, part


@part("ssmax", site="scale", paper="Nakanishi 2025, arXiv:2501.19399")
class SsMax:
    start: float = 0.43

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {"s": torch.full((dims.heads,), float(self.start))}

    def scale(self, q_pos: Rows, seen: Rows, weights: Weights) -> Factors:
        return weights["s"][None, :, None] * seen.clamp(min=1).to(torch.float64).log()[:, None]
