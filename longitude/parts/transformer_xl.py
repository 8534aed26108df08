"""Transformer-XL's relative attention: a content and a position term with learned global biases.

    score(i, j) = ((q_i + u)·k_j + (q_i + v)·(W R_{i-j})) / √d

Dai et al. 2019, "Transformer-XL" (arXiv:1901.02860); XLNet (bidirectional). R is sinusoidal, all
sines then all cosines; W, u and v are learned for each head; values carry no position. `clamp`
limits distances (0: unlimited). Segment memory is a matter of which keys are given: pass the
memory's keys with their positions. Site ⑤: a bias that reads q and k.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from longitude.core.part import (
    Bias,
    Dims,
    K,
    Q,
    Rows,
    Term,
    Weights,
    part,
    train_defaults,
)
from longitude.core.validate import NonNegativeInt, PositiveFloat, UserError
from longitude.parts.distance_bias import ByRow
from longitude.parts.sinusoidal import sinusoid


@part("transformer_xl", site="bias", paper="Dai et al. 2019, arXiv:1901.02860")
class TransformerXl(Bias):
    clamp: NonNegativeInt = 0
    base: PositiveFloat = 10000
    integer_positions: ClassVar[bool] = True

    @property
    def grows(self) -> bool:
        """Whether the term's table of distances grows with the call: n² numbers without a clamp."""
        return not self.clamp

    @property
    def flat_beyond(self) -> int | None:
        return self.clamp or None

    def init(self, dims: Dims, rng: torch.Generator | None) -> Weights:
        shape = (dims.heads, dims.head_dim)
        return {
            "relative": torch.randn(*shape, dims.dim, generator=rng) * dims.dim**-0.5,
            "u": torch.randn(*shape, generator=rng) * 0.02,
            "v": torch.randn(*shape, generator=rng) * 0.02,
        }

    def term(self, q: Q, k: K, q_pos: Rows, k_pos: Rows, weights: Weights, scale: float) -> Term:
        distances, row = self._distances(q_pos, k_pos)
        relative = weights["relative"].to(q.dtype)
        wave = sinusoid(distances, relative.shape[-1], self.base, "concatenated")
        keys = torch.einsum("hdm,rm->hrd", relative, wave.to(q.dtype))
        u, v = (weights[name].to(q.dtype) * scale for name in ("u", "v"))
        group = q.shape[1] // k.shape[1]
        content = torch.einsum("hd,bhjd->bhj", u, k.repeat_interleave(group, 1))

        entry = lambda r: row(r).to(torch.int64)  # noqa: E731
        return ByRow(q_pos, k_pos, q + v[:, None], keys, entry, content)

    def _distances(self, q_pos: Tensor, k_pos: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The distances that the table must hold, and the row of each: all from the least to the
        greatest, or, where positions have gaps, those that occur."""
        if q_pos.is_floating_point() or k_pos.is_floating_point():
            raise UserError("transformer_xl: distances must be integers: give integer positions.")
        if not q_pos.numel() or not k_pos.numel():
            return q_pos.new_zeros(1), torch.zeros_like
        low, high = int(q_pos.min() - k_pos.max()), int(q_pos.max() - k_pos.min())
        most = self.clamp or max(-low, high)
        low, high = max(min(low, most), -most), max(min(high, most), -most)
        if self.clamp or high - low < 4 * (q_pos.shape[1] + k_pos.shape[1]):
            distances = torch.arange(low, high + 1, device=q_pos.device)
            return distances, lambda r: r.clamp(low, high) - low
        distances = (q_pos[:, :, None] - k_pos[:, None, :]).unique()
        return distances, lambda r: torch.searchsorted(distances, r)

    training = train_defaults
