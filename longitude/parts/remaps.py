"""Remaps of rotary positions: which positions q and k take, by region of the (i, j) plane.

Training-free extensions keep the relative positions RoPE meets within the trained range: ReRoPE and
leaky ReRoPE (Su 2023), Self-Extend (Jin et al. 2024), dual chunk attention (An et al. 2024),
StreamingLLM (Xiao et al. 2023), LM-Infinite (Han et al. 2023). `inverse_leaky` (Su 2023) is for
training. Site ③, inside `rope(remap=…)`: each part returns disjoint regions for both signs of i -
j; a pair in no region is hidden.
"""

from longitude.core.part import Region, part, positive
from longitude.core.region import Area, Chunks, Shift, at
from longitude.core.validate import UserError


@part("rerope", site="remap", paper="Su 2023, kexue.fm/archives/9708")
class Rerope:
    """ReRoPE: distances are cut off at the window, min(i - j, w).

    Su 2023, "Transformer upgrade 12: ReRoPE, extrapolating without limit?" (kexue.fm 9708). Pairs
    closer than the window turn as ever; beyond it every key stands at distance w. Choose w well
    inside the trained length.
    """

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


def leak(window: int, divide: float) -> tuple[Region, ...]:
    """Distance r inside the window, window + (r - window)/divide beyond it, on both sides."""
    jump = window - window / divide
    slow, ahead = Shift(divide=divide), Shift(divide=divide, add=jump)
    return (
        Region(Area(lo=1 - window, hi=window)),
        Region(Area(lo=window), q=ahead, k=slow),
        Region(Area(hi=1 - window), q=slow, k=ahead),
    )


@part("leaky_rerope", site="remap", paper="Su 2023, kexue.fm/archives/9708")
class LeakyRerope:
    """Leaky ReRoPE: distances beyond the window grow k times more slowly, w + (i - j - w)/k.

    Su 2023 (kexue.fm 9708). A model trained to length L reads L' when w < L and w + (L' - 1 - w)/k
    <= L; half of L is better (kexue.fm 9731). ReRoPE is the limit of large k.
    """

    window: int
    factor: float

    def check(self) -> None:
        positive(self, "window", "factor")

    def regions(self) -> tuple[Region, ...]:
        return leak(self.window, self.factor)


@part("inverse_leaky", site="remap", paper="Su 2023, kexue.fm/archives/9728")
class InverseLeaky:
    """Inverse leaky ReRoPE, for training: distances beyond the window grow `step` times faster, w +
    step·(i - j - w).

    Su 2023, "Transformer upgrade 13: reverse use of leaky ReRoPE" (kexue.fm 9728). A model trained
    short with it has seen large distances, and reads long text with plain RoPE, at full speed (512
    to 4,096: w = 128, step 16).
    """

    window: int
    step: float

    def check(self) -> None:
        positive(self, "window", "step")

    def regions(self) -> tuple[Region, ...]:
        return leak(self.window, 1 / self.step)


@part("self_extend", site="remap", paper="Jin et al. 2024, arXiv:2401.01325")
class SelfExtend:
    """Self-Extend: beyond the window, positions are floored to groups, ⌊i/G⌋ - ⌊j/G⌋ + W - ⌊W/G⌋.

    Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning". Reaches (L -
    W)·G + W positions; the authors advise W + (N - W)/G below one half to two thirds of L. Query
    and key are floored apart, so one distance can map to two neighbouring values. Their eager code
    uses W/G unfloored, which gives fractions unless G divides W; the paper's own listing floors,
    and so does this.
    """

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


@part("dual_chunk", site="remap", paper="An et al. 2024, arXiv:2402.17463")
class DualChunk:
    """Dual chunk attention: keys stand at j mod s; a query's position depends on how many chunks
    back the key lies.

    An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models" (ChunkLlama;
    Qwen2.5-1M). With c = `size` and s = size - local: same chunk i mod s; the chunk before min(i
    mod s + s, c); earlier ones c. Distances stay within [0, c] and are exact up to local + 1. The
    authors' code takes c = 3L/4, local = L/8.
    """

    size: int
    local: int

    def check(self) -> None:
        positive(self, "size", "local")
        if self.size < 2 * self.local + 1:
            raise UserError(
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


@part("streaming", site="remap", paper="Xiao et al. 2023, arXiv:2309.17453")
class Streaming:
    """StreamingLLM: the first `sinks` tokens and the last `window`, numbered by their place in the
    cache.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Inside the window
    distances are true; a sink at position j stands at distance min(i, sinks + window - 1) - j, as
    if the cache were all there is. Memory is constant and generation endless; the context is not
    longer: what has left is forgotten.
    """

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


@part("lm_infinite", site="remap", paper="Han et al. 2023, arXiv:2308.16137")
class LmInfinite:
    """LM-Infinite: a window of true distances, and a few first tokens that all stand at the
    window's edge.

    Han et al. 2023, "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language
    Models". Λ-shaped mask: the last `window` and the first `globals` tokens; distances are capped
    at the window, min(i - j, w). The authors use the trained length for the window and 10 to 100
    global tokens.
    """

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
