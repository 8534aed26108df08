"""RoPE: pair t of a vector at position m turns by the angle m θ_t, so q·k depends on m - n alone.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding". `frequencies` says
how fast each pair turns, `remap` which positions are turned to, `decay` whether pairs fade with
distance (xPos). `tables` makes the cosines and sines, exact far out; `hf_precision` gives
transformers' float32 bits instead, for parity tests.
"""

from longitude.part import Decay, Frequencies, Mistake, Region, Remap, by_rows, part, positive
from longitude.parts.rotary.frequencies.unscaled import Unscaled
from longitude.parts.rotary.turn import Pairs


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
        if not by_rows(self.frequencies):
            return regions
        cut = [
            Region(r.where & rows, r.q, r.k, frequencies)
            for rows, frequencies in self.frequencies.bands(reach)
            for r in regions
        ]
        return tuple(r for r in cut if not r.where.empty)
