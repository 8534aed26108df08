"""Sliding window, with or without attention sinks: |i - j| < size, or j < sinks.

Beltagy et al. 2020, "Longformer" (window); Xiao et al. 2023, "Efficient Streaming Language Models
with Attention Sinks": a model trained with full attention collapses under a bare window
(Llama-2-13B, PG19, window 1,024: perplexity 5158) and recovers when the first four tokens stay
visible (4 + 1,020: 5.40). The window counts the query itself. Keys keep their true positions here;
`streaming` renumbers them.
"""

from longitude.part import not_negative, part, positive
from longitude.region import Area


@part(
    "window",
    site="mask",
    paper="Beltagy et al. 2020, arXiv:2004.05150; Xiao et al. 2023, arXiv:2309.17453",
)
class Window:
    size: int
    sinks: int = 0

    def check(self) -> None:
        positive(self, "size")
        not_negative(self, "sinks")

    def areas(self) -> tuple[Area, ...]:
        near = Area(lo=1 - self.size, hi=self.size)
        if not self.sinks:
            return (near,)
        first = Area(last=self.sinks)
        return (near, first & Area(lo=self.size), first & Area(hi=1 - self.size))
