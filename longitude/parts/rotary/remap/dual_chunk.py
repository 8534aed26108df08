"""Dual chunk attention: keys stand at j mod s; a query's position depends on how many chunks back
the key lies.

An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models" (ChunkLlama;
Qwen2.5-1M). With c = `size` and s = size - local: same chunk i mod s; the chunk before min(i mod s
+ s, c); earlier ones c. Distances stay within [0, c] and are exact up to local + 1. The authors'
code takes c = 3L/4, local = L/8.
"""

from longitude.part import Mistake, Region, part, positive
from longitude.region import Area, Chunks, Shift, at


@part("dual_chunk", site="remap", paper="An et al. 2024, arXiv:2402.17463")
class DualChunk:
    size: int
    local: int

    def check(self) -> None:
        positive(self, "size", "local")
        if self.size < 2 * self.local + 1:
            raise Mistake(
                f"dual_chunk: size must be more than twice local, but got {self.size} and "
                f"{self.local}: "
                f"3/4 and 1/8 of the trained length are usual."
            )

    def regions(self) -> tuple[Region, ...]:
        s = self.size - self.local

        def apart(lo: int | None, hi: int | None) -> Area:
            return Area(chunks=(Chunks(s, lo, hi),))

        here = Shift(modulo=s)
        after = Shift(modulo=s, add=s, least=self.size)
        return (
            Region(apart(0, 1), q=here, k=here),
            Region(apart(1, 2), q=after, k=here),
            Region(apart(2, None), q=at(self.size), k=here),
            Region(apart(-1, 0), q=here, k=after),
            Region(apart(None, -1), q=here, k=at(self.size)),
        )
