"""FLOATER: positions as the path of a flow, dp/dt = h(p, t), read off at t = 0, 1, 2, …

Liu et al. 2020, "Learning to Encode Position for Transformer with Continuous Dynamical Model". h is
a small network on (p, t); the path starts at a learned p(0) and is solved by fourth-order
Runge-Kutta with a fixed step, always from position 0, so a position's code never depends on what
else is asked for. Only the flow at the input is built: the paper's further flows, biases on q, k
and v in every layer, are not.
"""

import torch
from torch import Tensor

from longitude.part import Dims, Mistake, Places, Vectors, Weights, part, positive


@part("floater", site="embed", paper="Liu et al. 2020, arXiv:2003.09229")
class Floater:
    hidden: int = 64
    steps: int = 1
    """Solver steps between two neighbouring positions."""

    def check(self) -> None:
        positive(self, "hidden", "steps")

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
            seen = torch.cat([p, p.new_tensor([t])]) @ weights["inward"] + weights["inward_bias"]
            return seen.tanh() @ weights["outward"] + weights["outward_bias"]

        for step in range((length - 1) * self.steps):
            t = step * dt
            k1 = flow(p, t)
            k2 = flow(p + dt / 2 * k1, t + dt / 2)
            k3 = flow(p + dt / 2 * k2, t + dt / 2)
            p = p + dt / 6 * (k1 + 2 * k2 + 2 * k3 + flow(p + dt * k3, t + dt))
            if (step + 1) % self.steps == 0:
                points.append(p)
        return torch.stack(points)

    def embed(self, x: Vectors, pos: Places, weights: Weights) -> Vectors:
        if pos.is_floating_point() or (pos.numel() and pos.min() < 0):
            raise Mistake(
                "floater: the flow is read off at whole positions from 0 on: give such positions."
            )
        reach = int(pos.max()) + 1 if pos.numel() else 1
        return x + self.path(reach, weights)[pos].to(x.dtype)
