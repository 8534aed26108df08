"""LM-Infinite: a window of true distances, and a few first tokens that all stand at the window's
edge.

Han et al. 2023, "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language Models".
Λ-shaped mask: the last `window` and the first `globals` tokens; distances are capped at the window,
min(i - j, w). The authors use the trained length for the window and 10 to 100 global tokens.
"""

from longitude.part import Region, part, positive
from longitude.region import Area, at


@part("lm_infinite", site="remap", paper="Han et al. 2023, arXiv:2308.16137")
class LmInfinite:
    window: int
    globals: int = 10

    def check(self) -> None:
        positive(self, "window", "globals")

    def regions(self) -> tuple[Region, ...]:
        w, first = self.window, Area(last=self.globals)
        return (
            Region(Area(lo=1 - w, hi=w)),
            Region(first & Area(lo=w), q=at(w), k=at(0)),
            Region(first & Area(hi=1 - w), q=at(0), k=at(w)),
        )
