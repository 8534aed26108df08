"""Dynamic NTK: the base grows with the length, b' = b · (f·l/L - (f - 1))^(d/(d-2)) for l > L.

emozilla 2023; transformers' type "dynamic", whose L is `max_position_embeddings`. The length l is
an input of the call, fixed for the life of a cache: with a length that changes under it, decoding
would differ from prefill in every layer but the first.
"""

from typing import ClassVar

import torch

from longitude.part import Half, part, positive
from longitude.parts.rotary.frequencies.ntk import stretched
from longitude.parts.rotary.frequencies.unscaled import powers


@part("dynamic_ntk", site="frequencies", paper="emozilla 2023; Peng et al. 2023, arXiv:2309.00071")
class DynamicNtk:
    original: int
    factor: float = 1
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original", "factor")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        grown = (self.factor * max(length, self.original) / self.original) - (self.factor - 1)
        return 1.0 / powers(dim, stretched(base, grown, dim), dtype)

    def gain(self, length: int) -> float:
        return 1.0
