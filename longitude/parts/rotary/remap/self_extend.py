"""Self-Extend: beyond the window, positions are floored to groups, ⌊i/G⌋ - ⌊j/G⌋ + W - ⌊W/G⌋.

Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning". Reaches (L -
W)·G + W positions; the authors advise W + (N - W)/G below one half to two thirds of L. Query and
key are floored apart, so one distance can map to two neighbouring values. Their eager code uses W/G
unfloored, which gives fractions unless G divides W; the paper's own listing floors, and so does
this.
"""

from longitude.part import Region, part, positive
from longitude.region import Area, Shift


@part("self_extend", site="remap", paper="Jin et al. 2024, arXiv:2401.01325")
class SelfExtend:
    group: int
    window: int

    def check(self) -> None:
        positive(self, "group", "window")

    def regions(self) -> tuple[Region, ...]:
        g, w = self.group, self.window
        grouped = Shift(divide=g, floor=True)
        ahead = Shift(divide=g, floor=True, add=w - w // g)
        return (
            Region(Area(lo=1 - w, hi=w)),
            Region(Area(lo=w), q=ahead, k=grouped),
            Region(Area(hi=1 - w), q=grouped, k=ahead),
        )
