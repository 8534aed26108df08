"""ReRoPE: distances are cut off at the window, min(i - j, w).

Su 2023, "Transformer upgrade 12: ReRoPE, extrapolating without limit?" (kexue.fm 9708). Pairs
closer than the window turn as ever; beyond it every key stands at distance w. Choose w well inside
the trained length.
"""

from longitude.part import Region, part, positive
from longitude.region import Area, at


@part("rerope", site="remap", paper="Su 2023, kexue.fm/archives/9708")
class Rerope:
    window: int

    def check(self) -> None:
        positive(self, "window")

    def regions(self) -> tuple[Region, ...]:
        w = self.window
        return (
            Region(Area(lo=1 - w, hi=w)),
            Region(Area(lo=w), q=at(w), k=at(0)),
            Region(Area(hi=1 - w), q=at(0), k=at(w)),
        )
