"""Sequential positions: token t stands at t.

The default. Its ids are a `range`, which lets a backend take the fast way without reading a tensor.
"""

import torch

from longitude.part import Pos, part


@part("sequential", site="positions", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Sequential:
    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        return range(n)
