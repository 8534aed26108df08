"""StreamingLLM: the first `sinks` tokens and the last `window`, numbered by their place in the
cache.

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Inside the window
distances are true; a sink at position j stands at distance min(i, sinks + window - 1) - j, as if
the cache were all there is. Memory is constant and generation endless; the context is not longer:
what has left is forgotten.
"""

from longitude.part import Region, part, positive
from longitude.region import Area, Shift


@part("streaming", site="remap", paper="Xiao et al. 2023, arXiv:2309.17453")
class Streaming:
    sinks: int
    window: int

    def check(self) -> None:
        positive(self, "sinks", "window")

    def regions(self) -> tuple[Region, ...]:
        w, first = self.window, Area(last=self.sinks)
        capped = Shift(least=self.sinks + w - 1)
        return (
            Region(Area(lo=1 - w, hi=w)),
            Region(first & Area(lo=w), q=capped),
            Region(first & Area(hi=1 - w), k=capped),
        )
