"""NTK-aware scaling: a larger base, b' = b · s^(d/(d-2)), d the rotary dimension of one head.

bloc97 2023. The fastest pair keeps its frequency exactly, the slowest is divided by s exactly. Set
the factor above the ratio of lengths you need: it is reliable to about half of it (kexue.fm 9948).
"""

from typing import ClassVar

import torch

from longitude.part import Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.unscaled import powers


def stretched(base: float, factor: float, dim: int) -> float:
    """The base at which the slowest of dim/2 pairs turns `factor` times slower."""
    if dim <= 2:
        raise Mistake(
            f"ntk: a rotary dimension of {dim} has one pair, which can't both stay and stretch: "
            f"use linear()."
        )
    return base * factor ** (dim / (dim - 2))


@part("ntk", site="frequencies", paper="bloc97 2023; Peng et al. 2023, arXiv:2309.00071")
class Ntk:
    factor: float
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "factor")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return 1.0 / powers(dim, stretched(base, self.factor, dim), dtype)

    def gain(self, length: int) -> float:
        return 1.0
