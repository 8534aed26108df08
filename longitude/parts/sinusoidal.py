"""Absolute positions as functions of position: sinusoidal, and FLOATER's learned flow.

    PE(p, 2i) = sin(p ω_i), PE(p, 2i+1) = cos(p ω_i), ω_i = base^(-2i/d)

Vaswani et al. 2017 (arXiv:1706.03762); Liu et al. 2020 (arXiv:2003.09229) replace the formula by
the solution of a learned differential equation. Site ②: added to the embeddings, at any position.
"""

from typing import Literal

import torch
from torch import Tensor

from longitude.core.part import (
    Dims,
    Embed,
    TokenPositions,
    Vectors,
    Weights,
    part,
    train_defaults,
)
from longitude.core.validate import PositiveFloat, PositiveInt, UserError

Layout = Literal["interleaved", "concatenated"]
Spacing = Literal["paper", "endpoint"]


def sinusoid(
    pos: Tensor, dim: int, base: float, layout: Layout, spacing: Spacing = "paper"
) -> Tensor:
    """Sines and cosines of float64 angles, shape (*pos, dim)."""
    if dim % 2:
        raise UserError(
            f"sinusoidal: the dimension must be even, but got {dim}: sines and cosines come in "
            f"pairs."
        )
    steps = dim / 2 if spacing == "paper" else max(dim // 2 - 1, 1)
    omega = float(base) ** (-torch.arange(dim // 2, dtype=torch.float64, device=pos.device) / steps)
    angle = pos.to(torch.float64)[..., None] * omega
    both = (angle.sin(), angle.cos())
    return torch.stack(both, -1).flatten(-2) if layout == "interleaved" else torch.cat(both, -1)


@part("sinusoidal", site="embed", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Sinusoidal(Embed):
    """Sinusoidal positions: PE(p, 2i) = sin(p ω_i), PE(p, 2i+1) = cos(p ω_i), ω_i = base^(-2i/d).

    Vaswani et al. 2017. Two layouts and two spacings are in use and are not interchangeable: the
    paper interleaves sin and cos and spaces by 2i/d ("paper"); tensor2tensor, fairseq and Whisper
    put all sines before all cosines and space by i/(d/2 - 1) ("endpoint", the last wavelength is
    exactly 2π·base); transformers' Marian and Pegasus do the first but keep the paper's spacing.
    PE(p + k) is a linear map of PE(p); PE(p)·PE(r) depends on |p - r| only, so it cannot tell
    direction.
    """

    base: PositiveFloat = 10000
    layout: Layout = "interleaved"
    spacing: Spacing = "paper"

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors:
        return x + sinusoid(pos, x.shape[-1], self.base, self.layout, self.spacing).to(x.dtype)

    training = train_defaults


@part("floater", site="embed", paper="Liu et al. 2020, arXiv:2003.09229")
class Floater(Embed):
    """FLOATER: positions as the path of a flow, dp/dt = h(p, t), read off at t = 0, 1, 2, …

    Liu et al. 2020, "Learning to Encode Position for Transformer with Continuous Dynamical Model".
    h is a small network on (p, t); the path starts at a learned p(0) and is solved by fourth-order
    Runge-Kutta with a fixed step, always from position 0, so a position's code never depends on
    which others are needed. Only the flow at the input is built: the paper's further flows, biases
    on q, k and v in every layer, are not.
    """

    hidden: PositiveInt = 64
    steps: PositiveInt = 1
    """Solver steps between two neighbouring positions."""

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng) * shape[0] ** -0.5

        return {
            "start": torch.randn(dims.dim, generator=rng) * 0.02,
            "inward": draw(dims.dim + 1, self.hidden),
            "inward_bias": torch.zeros(self.hidden),
            "outward": draw(self.hidden, dims.dim) * 0.1,
            "outward_bias": torch.zeros(dims.dim),
        }

    def path(self, length: int, weights: Weights) -> Tensor:
        """p(0), …, p(length - 1)."""
        dt, p, points = 1 / self.steps, weights["start"], [weights["start"]]

        def flow(p: Tensor, t: float) -> Tensor:
            hidden = torch.cat([p, p.new_tensor([t])]) @ weights["inward"] + weights["inward_bias"]
            return hidden.tanh() @ weights["outward"] + weights["outward_bias"]

        for step in range((length - 1) * self.steps):
            t = step * dt
            k1 = flow(p, t)
            k2 = flow(p + dt / 2 * k1, t + dt / 2)
            k3 = flow(p + dt / 2 * k2, t + dt / 2)
            p = p + dt / 6 * (k1 + 2 * k2 + 2 * k3 + flow(p + dt * k3, t + dt))
            if (step + 1) % self.steps == 0:
                points.append(p)
        return torch.stack(points)

    def embed(self, x: Vectors, pos: TokenPositions, weights: Weights) -> Vectors:
        if pos.is_floating_point() or (pos.numel() and pos.min() < 0):
            raise UserError(
                "floater: the flow is read off at integer positions from 0 on: give such positions."
            )
        reach = int(pos.max()) + 1 if pos.numel() else 1
        return x + self.path(reach, weights)[pos].to(x.dtype)

    training = train_defaults
