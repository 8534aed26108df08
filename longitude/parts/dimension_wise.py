"""DPE: Self-Extend with a group size of its own for each band of rotary pairs.

Lu et al. 2025, "Effective Length Extrapolation via Dimension-Wise Positional Embeddings
Manipulation" (COLM). Beyond the window W, pairs of band g see ⌊i/G_g⌋ - ⌊j/G_g⌋ + W - ⌊W/G_g⌋; the
bands are equally wide, from the fastest pairs to the slowest. Pairs in `exact` see the true
distance: the paper keeps 16 of 64 so, chosen per layer and head, where this is one list for all
heads of a layer. The authors' prefill leaves W/G unfloored, their decoding floors it, as does this:
with equal groups it is `self_extend(G, W)`. Site ③, inside `rope(remap=…)`.
"""

from collections.abc import Iterator
from itertools import takewhile

from longitude.core.lengths import Lengths, Setting
from longitude.core.part import Choice, Region, Remap, part
from longitude.core.region import PairShifts, Shift
from longitude.core.validate import PositiveInt, UserError
from longitude.parts.remaps import SelfExtend, near_and_far

# detected by the authors for Llama-3-8B at 16 times its window
LLAMA3 = (2, 8, 2, 8, 32, 32, 32, 4)


@part("dimension_wise", site="remap", paper="Lu et al. 2025, arXiv:2504.18857")
class DimensionWise(Remap):
    groups: tuple[int, ...]
    window: PositiveInt = 1024
    exact: tuple[int, ...] = ()

    def check(self) -> None:
        if not self.groups or min(self.groups) < 1 or min(self.exact, default=0) < 0:
            raise UserError(
                f"dimension_wise: groups are positive and exact pairs counted from 0, but got "
                f"{self.groups} and {self.exact}: {LLAMA3} are those of Llama-3-8B at 128k."
            )

    def regions(self) -> tuple[Region, ...]:
        w = self.window
        if len(set(self.groups)) == 1 and not self.exact:
            return SelfExtend(self.groups[0], w).regions()
        k = tuple(Shift(divide=g, floor=True) for g in self.groups)
        q = tuple(Shift(divide=g, floor=True, add=w - w // g) for g in self.groups)
        return near_and_far(w, PairShifts(q, self.exact), PairShifts(k, self.exact))

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        """Llama-3-8B's groups, in proportion to the ratio of the lengths: `grid` is for others."""
        groups = tuple(max(1, round(g * lengths.ratio / 16)) for g in LLAMA3)
        return [cls(groups, lengths.share(8))]

    def grid(self, lengths: Lengths) -> Iterator[Setting]:
        """One band at a time, by powers of two up to four times the ratio, as the authors detect
        them; and other windows."""
        sizes = [*takewhile(lambda g: g <= 4 * lengths.ratio, (2**n for n in range(20)))]
        for band in range(len(self.groups)):
            for g in sizes:
                yield {"groups": (*self.groups[:band], g, *self.groups[band + 1 :])}
        yield from ({"window": w} for w in lengths.windows(self.window))
