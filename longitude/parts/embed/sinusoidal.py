"""Sinusoidal positions: PE(p, 2i) = sin(p ω_i), PE(p, 2i+1) = cos(p ω_i), ω_i = base^(-2i/d).

Vaswani et al. 2017. Two layouts and two spacings are in use and are not interchangeable: the paper
interleaves sin and cos and spaces by 2i/d ("paper"); tensor2tensor, fairseq and Whisper put all
sines before all cosines and space by i/(d/2 - 1) ("endpoint", the last wavelength is exactly
2π·base); transformers' Marian and Pegasus do the first but keep the paper's spacing. PE(p + k) is a
linear map of PE(p); PE(p)·PE(r) depends on |p - r| only, so it cannot tell direction.
"""

from typing import Literal

import torch
from torch import Tensor

from longitude.part import Dims, Mistake, Places, Vectors, Weights, part, positive

Layout = Literal["interleaved", "concatenated"]
Spacing = Literal["paper", "endpoint"]


def sinusoid(
    pos: Tensor, dim: int, base: float, layout: Layout, spacing: Spacing = "paper"
) -> Tensor:
    """Sines and cosines of float64 angles, shape (*pos, dim)."""
    if dim % 2:
        raise Mistake(
            f"sinusoidal: the dimension must be even, but got {dim}: sines and cosines come in "
            f"pairs."
        )
    steps = dim / 2 if spacing == "paper" else max(dim // 2 - 1, 1)
    omega = float(base) ** (-torch.arange(dim // 2, dtype=torch.float64, device=pos.device) / steps)
    angle = pos.to(torch.float64)[..., None] * omega
    both = (angle.sin(), angle.cos())
    return torch.stack(both, -1).flatten(-2) if layout == "interleaved" else torch.cat(both, -1)


@part("sinusoidal", site="embed", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Sinusoidal:
    base: float = 10000
    layout: Layout = "interleaved"
    spacing: Spacing = "paper"

    def check(self) -> None:
        positive(self, "base")

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        return {}

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        return x + sinusoid(pos, x.shape[-1], self.base, self.layout, self.spacing).to(x.dtype)
