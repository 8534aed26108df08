"""RoPE: pair t of a vector at position m turns by the angle m θ_t, so q·k depends on m - n alone.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding". `frequencies` says
how fast each pair turns, `remap` which positions are turned to, `decay` whether pairs fade with
distance (xPos). Angles are made in float64 and only then rounded: in float32 the cosine is off by
0.07 at position one million. `precision="hf"` gives transformers' float32 bits instead, for parity
tests.
"""

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from longitude.part import (
    Banded,
    Decay,
    Frequencies,
    Mistake,
    Pos,
    Remap,
    as_tensor,
    part,
    positive,
)
from longitude.parts.rotary.frequencies.unscaled import Unscaled
from longitude.parts.rotary.turn import Pairs
from longitude.region import Region, Shift

Tables = tuple[Tensor, Tensor]


@part("rope", site="rotary", paper="Su et al. 2021, arXiv:2104.09864")
class Rope:
    base: float = 10000
    fraction: float = 1
    pairs: Pairs = "half"
    frequencies: Frequencies = Unscaled()
    remap: Remap | None = None
    decay: Decay | None = None

    def check(self) -> None:
        positive(self, "base")
        if self.base <= 1:
            raise Mistake(f"rope: base must be above 1, but got {self.base}: 10000 is usual.")
        if not 0 < self.fraction <= 1:
            raise Mistake(
                f"rope: fraction must lie in (0, 1], but got {self.fraction}: 0.25 turns a "
                f"quarter of each head."
            )

    def dim(self, head_dim: int) -> int:
        """The rotary dimensions of a head."""
        dim = int(head_dim * self.fraction)
        if dim % 2 or not dim:
            raise Mistake(
                f"rope: {self.fraction} of a head of {head_dim} is {dim} rotary dimensions, "
                f"which can't be paired: "
                f"choose a fraction or a head size that makes an even number."
            )
        return dim

    def regions(self, reach: int = 1) -> tuple[Region, ...]:
        """Disjoint regions for queries below `reach`: the remap's, cut where frequencies change by
        rows."""
        regions = self.remap.regions() if self.remap else (Region(),)
        if not isinstance(self.frequencies, Banded):
            return regions
        cut = [
            Region(r.where & rows, r.q, r.k, frequencies)
            for rows, frequencies in self.frequencies.bands(reach)
            for r in regions
        ]
        return tuple(r for r in cut if not r.where.empty)


def angles(
    rope: Rope, region: Region, pos: Tensor, head_dim: int, lengths: tuple[int, ...]
) -> Tensor:
    """Float64 angles (b|1, n, half) of positions (b|1, n) that are already shifted."""
    frequencies = region.frequencies or rope.frequencies
    inv = torch.stack([frequencies.inv_freq(rope.dim(head_dim), rope.base, n) for n in lengths])
    return pos.to(torch.float64)[..., None] * inv[:, None].to(pos.device)


def cos_sin(
    rope: Rope, region: Region, side: Literal["q", "k"], pos: Pos, head_dim: int, lengths: tuple[int, ...],
    *, dtype: torch.dtype, device: torch.device, centre: float = 0.0,
) -> Tables:  # fmt: skip
    """Tables (b|1, 1, n, half) that turn one side of a region; a query's carry the gain of the
    score."""
    make = _made_once if isinstance(pos, range) and not torch.compiler.is_compiling() else _make
    return make(rope, region, side, pos, head_dim, lengths, dtype, device, centre)


def _make(
    rope: Rope, region: Region, side: str, pos: Pos, head_dim: int, lengths: tuple[int, ...],
    dtype: torch.dtype, device: torch.device, centre: float,
) -> Tables:  # fmt: skip
    with torch.inference_mode(False), torch.no_grad():
        shift: Shift = region.q if side == "q" else region.k
        where = shift(torch.atleast_2d(as_tensor(pos, device)))
        angle = angles(rope, region, where, head_dim, lengths)
        size = torch.ones_like(angle)
        if side == "q":
            frequencies = region.frequencies or rope.frequencies
            gains = [frequencies.gain(n) for n in lengths]
            size = size * torch.tensor(gains, dtype=torch.float64, device=device)[:, None, None]
        if rope.decay:
            rate = rope.decay.rate(rope.dim(head_dim)).to(device)
            size = size * (rate * ((where - centre) * (1 if side == "q" else -1))[..., None]).exp()
        return tuple((f * size).to(dtype)[:, None] for f in (angle.cos(), angle.sin()))  # type: ignore[return-value]


_made_once = lru_cache(maxsize=32)(_make)
