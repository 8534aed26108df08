"""Several positions per token: axial RoPE for images, its mixed form, and M-RoPE.

A token has a position on each axis, p_a, and pair i rotates by Σ_a p_a f_a,i. One position per
token serves all axes. Each part here gives f from the frequencies θ of `rope(frequencies=…)`,
so that a larger image or a longer text is interpolated as any other rotation is. q·k depends on
the differences p_a(m) - p_a(n) alone, axis by axis. Site ③, inside `rope(axes=…)`.
"""

import math
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from longitude.core.part import Axes, Dims, Frequencies, Weights, part
from longitude.core.validate import UserError
from longitude.parts.frequencies import Unscaled, powers


@part("mrope", site="axes", paper="Wang et al. 2024, arXiv:2409.12191")
class Mrope(Axes):
    """M-RoPE: one list of frequencies, and each pair rotates by time, row or column.

    Wang et al. 2024, "Qwen2-VL". Sections count pairs: (16, 24, 24) gives the first 16 to time, 24
    to rows, 24 to columns. Interleaved (Qwen3-VL, Qwen3.5), pair i belongs to axis i mod 3 as long
    as that axis has pairs left, and to time after that. In a text the three positions of a token
    are equal, and M-RoPE is RoPE.
    """

    sections: tuple[int, ...]
    interleaved: bool = False
    temporal: ClassVar[bool] = True

    def check(self) -> None:
        if len(self.sections) < 2 or min(self.sections) < 1:
            raise UserError(
                f"mrope: sections must be a number of pairs for each of two axes or more, but got "
                f"{self.sections}: write for example (16, 24, 24)."
            )

    @property
    def count(self) -> int:
        return len(self.sections)

    def check_dim(self, dim: int) -> None:
        if sum(self.sections) != dim // 2:
            raise UserError(
                f"mrope: sections {self.sections} share out {sum(self.sections)} pairs, but a "
                f"rotary dimension of {dim} has {dim // 2}: give sections that sum to it."
            )

    def axis_of_pairs(self) -> tuple[int, ...]:
        """The axis whose position each pair rotates by."""
        if not self.interleaved:
            return tuple(a for a, pairs in enumerate(self.sections) for _ in range(pairs))
        count, pairs = len(self.sections), range(sum(self.sections))
        return tuple(i % count if i < count * self.sections[i % count] else 0 for i in pairs)

    def inv_freq(
        self, frequencies: Frequencies, dim: int, base: float, length: int, weights: Weights
    ) -> Tensor:
        theta = frequencies.inv_freq(dim, base, length)
        return by_axis(self.axis_of_pairs(), self.count, theta)


def by_axis(axis_of_pairs: tuple[int, ...], count: int, theta: Tensor) -> Tensor:
    """Frequencies (axes 1 pairs): θ_i on the axis that pair i rotates by, 0 on the others."""
    axis = torch.tensor(axis_of_pairs, device=theta.device)
    rotates = torch.arange(count, device=theta.device)[:, None] == axis
    return (rotates * theta)[:, None]


class TwoAxes(Axes, Protocol):
    """A row and a column, each with half of the pairs."""

    name: ClassVar[str] = ""  # set by @part

    @property
    def count(self) -> int:
        return 2

    def check_dim(self, dim: int) -> None:
        if dim % 4:
            raise UserError(
                f"{self.name}: a rotary dimension of {dim} has {dim // 2} pairs, which two axes "
                f"can't share evenly: choose a head size that 4 divides."
            )


@part("axial", site="axes", paper="Heo et al. 2024, arXiv:2403.13298")
class Axial(TwoAxes):
    """Axial RoPE: the first half of the pairs rotates by the first position, the rest by the
    second.

    Heo et al. 2024, "Rotary Position Embedding for Vision Transformer". "shared": both axes have
    the d/4 frequencies base^(-4t/d) of a rotation of d/2 dimensions (RoPE-ViT with base 100; the
    vision towers of Qwen2-VL to Qwen3.5). "alternating": of the d/2 frequencies of a plain rotation
    the first axis has θ_0, θ_2, … and the second θ_1, θ_3, … (Pixtral). A class token at position 0
    on both axes is not rotated.
    """

    spectrum: Literal["shared", "alternating"] = "shared"

    def inv_freq(
        self, frequencies: Frequencies, dim: int, base: float, length: int, weights: Weights
    ) -> Tensor:
        if self.spectrum == "shared":
            theta = frequencies.inv_freq(dim // 2, base, length).repeat(2)
        else:
            theta = frequencies.inv_freq(dim, base, length).view(-1, 2).mT.flatten()
        return by_axis((0,) * (dim // 4) + (1,) * (dim // 4), 2, theta)


@part("mixed", site="axes", paper="Heo et al. 2024, arXiv:2403.13298")
class Mixed(TwoAxes):
    """RoPE-Mixed: pair t of head h rotates by x f^x_ht + y f^y_ht, all of them learned.

    Heo et al. 2024, "Rotary Position Embedding for Vision Transformer". Initially the first half of
    a head's pairs has the frequencies base^(-4t/d) of axial RoPE (base 10 in the paper's code)
    along one random direction, the second half along its perpendicular. A scaling divides the
    learned values as it would divide these frequencies. Train the weight without weight decay.
    """

    def weights(self, dims: Dims, dim: int, base: float, rng: torch.Generator | None) -> Weights:
        angle = 2 * math.pi * torch.rand(dims.heads, 1, generator=rng, dtype=torch.float64)
        theta = 1 / powers(dim // 2, base)
        angles = torch.cat(
            [angle.expand(-1, len(theta)), (angle + math.pi / 2).expand(-1, len(theta))], 1
        )
        frequencies = torch.stack([angles.cos(), angles.sin()]) * theta.repeat(2)
        return {"axes": frequencies.to(torch.get_default_dtype())}

    def inv_freq(
        self, frequencies: Frequencies, dim: int, base: float, length: int, weights: Weights
    ) -> Tensor:
        if "axes" not in weights:
            return Axial().inv_freq(frequencies, dim, base, length, weights)
        learned = weights["axes"].double()
        if frequencies == Unscaled():
            return learned
        ratio = frequencies.inv_freq(dim // 2, base, length) * powers(dim // 2, base)
        return learned * ratio.repeat(2).to(learned.device)
