"""Remaps of rotary positions: which positions q and k take, by region of the (i, j) plane.

Training-free extensions keep the relative positions RoPE meets within the trained range: ReRoPE and
leaky ReRoPE (Su 2023), Self-Extend (Jin et al. 2024), dual chunk attention (An et al. 2024),
STRING (An et al. 2024), StreamingLLM (Xiao et al. 2023), LM-Infinite (Han et al. 2023),
DPE (Lu et al. 2025). `inverse_leaky` (Su 2023) is for training. Site ③, inside `rope(remap=…)`:
each part returns disjoint regions for both signs of i - j; a pair in no region is hidden.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import takewhile

from longitude.core.lengths import NEARBY, Lengths, Setting, combinations, distinct
from longitude.core.part import Choice, Region, Remap, part
from longitude.core.region import EVERYWHERE, SAME, Area, Chunks, PairShifts, Shift, at
from longitude.core.validate import PositiveFloat, PositiveInt, UserError
from longitude.parts.scales import LogN

# group sizes that DPE's authors detected for Llama-3-8B at 16 times its window
LLAMA3 = (2, 8, 2, 8, 32, 32, 32, 4)


def near_and_far(
    window: int,
    q: Shift | PairShifts,
    k: Shift | PairShifts = SAME,
    keys: Area = EVERYWHERE,
) -> tuple[Region, ...]:
    """Regions with true distances within the window, and q and k shifted beyond it for keys in the
    area `keys`. Keys ahead mirror those behind."""
    return (
        Region(Area(lo=1 - window, hi=window)),
        Region(keys & Area(lo=window), q, k),
        Region(keys & Area(hi=1 - window), k, q),
    )


@part("rerope", site="remap", paper="Su 2023, kexue.fm/archives/9708")
class Rerope(Remap):
    """ReRoPE: distances are cut off at the window, min(i - j, w).

    Su 2023, "Transformer upgrade 12: ReRoPE, extrapolating without limit?" (kexue.fm 9708). Pairs
    closer than the window keep their distance; beyond it every key is at distance w. Choose w well
    inside the trained length.
    """

    window: PositiveInt

    def regions(self) -> tuple[Region, ...]:
        return near_and_far(self.window, at(self.window), at(0))

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        """Half of the trained length, and a quarter: a narrow window keeps more of far text and
        predicts less well from near text."""
        return [cls(lengths.share(2)), cls(lengths.share(4))]

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [(cls(lengths.share(2)), LogN(lengths.trained))]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(window=lengths.windows(self.window))


def leak(window: int, divide: float) -> tuple[Region, ...]:
    """Distance r inside the window, window + (r - window)/divide beyond it, on both sides."""
    q = Shift(divide=divide, add=window - window / divide)
    return near_and_far(window, q, Shift(divide=divide))


def leak_factor(lengths: Lengths) -> int:
    """4T/L: with a window of L/2, distances stay below 3L/4 (Su, kexue.fm 9708, asks for L)."""
    return max(2, math.ceil(4 * lengths.target / lengths.trained))


@part("leaky_rerope", site="remap", paper="Su 2023, kexue.fm/archives/9708")
class LeakyRerope(Remap):
    """Leaky ReRoPE: distances beyond the window grow k times more slowly, w + (i - j - w)/k.

    Su 2023 (kexue.fm 9708). A model trained to length L reads L' when w < L and w + (L' - 1 - w)/k
    <= L; half of L is better (kexue.fm 9731). ReRoPE is the limit of large k.
    """

    window: PositiveInt
    factor: PositiveFloat

    def regions(self) -> tuple[Region, ...]:
        return leak(self.window, self.factor)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.share(2), leak_factor(lengths))]

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        half, factor = lengths.share(2), leak_factor(lengths)
        return [
            cls(half, max(2, factor // 2)),
            (cls(half, factor), LogN(lengths.trained)),
            cls(lengths.share(4), factor),
        ]

    def grid(self, lengths: Lengths) -> Iterator[Setting]:
        """Factors that keep w + (T - 1 - w)/k within the trained length."""
        for w in lengths.windows(self.window):
            beyond = lengths.target - 1 - w
            limits = [share * lengths.trained for share in (1 / 2, 3 / 4, 1)]
            smallest = [beyond / (limit - w) for limit in limits if limit > w]
            near = [self.factor * step for step in (*NEARBY, 1, 2)]
            factors = distinct(math.ceil(k * 100) / 100 for k in (*smallest, *near) if k >= 1)
            fit = [k for k in factors if w + beyond / k <= lengths.trained]
            yield from combinations(window=[w], factor=fit)


@part("inverse_leaky", site="remap", paper="Su 2023, kexue.fm/archives/9728")
class InverseLeaky(Remap):
    """Inverse leaky ReRoPE, for training: distances beyond the window grow `step` times faster, w +
    step·(i - j - w).

    Su 2023, "Transformer upgrade 13: reverse use of leaky ReRoPE" (kexue.fm 9728). A model trained
    short with it has seen large distances, and reads long text with plain RoPE, at full speed (512
    to 4,096: w = 128, step 16).
    """

    window: PositiveInt
    step: PositiveFloat

    def regions(self) -> tuple[Region, ...]:
        return leak(self.window, 1 / self.step)

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [cls(max(2, length // 4), 16)]

    def at_test(self) -> None:
        """The trained model is run with plain RoPE."""
        return None


@part("self_extend", site="remap", paper="Jin et al. 2024, arXiv:2401.01325")
class SelfExtend(Remap):
    """Self-Extend: beyond the window, positions are floored to groups, ⌊i/G⌋ - ⌊j/G⌋ + W - ⌊W/G⌋.

    Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning". Reaches (L -
    W)·G + W positions; the authors advise W + (N - W)/G below one half to two thirds of L. Query
    and key are floored separately, so one distance can map to two neighbouring values. Their eager
    code uses W/G unfloored, which gives fractions unless G divides W; the paper's own listing
    floors, and so does this.
    """

    group: PositiveInt
    window: PositiveInt

    def regions(self) -> tuple[Region, ...]:
        g, w = self.group, self.window
        q = Shift(divide=g, floor=True, add=w - w // g)
        return near_and_far(w, q, Shift(divide=g, floor=True))

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        """The smallest power of two that keeps W + (T - W)/G within 2/3 of the trained length."""
        window = lengths.share(4)
        smallest = math.ceil((lengths.target - window) / (2 * lengths.trained / 3 - window))
        return [cls(2 ** max(1, (max(2, smallest) - 1).bit_length()), window)]

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(leak_factor(lengths), lengths.share(8))]

    def grid(self, lengths: Lengths) -> Iterator[Setting]:
        """Groups with (L - W)·G + W >= T."""
        for w in lengths.windows(self.window):
            beyond = lengths.target - w
            limits = [share * lengths.trained for share in (1 / 2, 2 / 3, 1)]
            smallest = [math.ceil(beyond / (limit - w)) for limit in limits if limit > w]
            near = (self.group, self.group - 1, self.group + 1, 2 * self.group)
            groups = distinct((*smallest, *near))
            fit = [g for g in groups if g > 1 and (lengths.trained - w) * g + w >= lengths.target]
            yield from combinations(group=fit, window=[w])


@part("dual_chunk", site="remap", paper="An et al. 2024, arXiv:2402.17463")
class DualChunk(Remap):
    """Dual chunk attention: keys take position j mod s; a query's position depends on how many
    chunks back the key lies.

    An et al. 2024, "Training-Free Long-Context Scaling of Large Language Models" (ChunkLlama;
    Qwen2.5-1M). With c = `size` and s = size - local: same chunk i mod s; the chunk before min(i
    mod s + s, c); earlier ones c. Distances stay within [0, c] and are exact up to local + 1. The
    authors' code takes c = 3L/4, local = L/8.
    """

    size: PositiveInt
    local: PositiveInt

    def check(self) -> None:
        if self.size < 2 * self.local + 1:
            raise UserError(
                f"dual_chunk: size must be more than twice local, but got {self.size} and "
                f"{self.local}: "
                f"3/4 and 1/8 of the trained length are usual."
            )

    def regions(self) -> tuple[Region, ...]:
        s = self.size - self.local

        def chunks(lo: int | None, hi: int | None) -> Area:
            return Area(chunks=(Chunks(s, lo, hi),))

        here = Shift(modulo=s)
        after = Shift(modulo=s, add=s, least=self.size)
        return (
            Region(chunks(0, 1), q=here, k=here),
            Region(chunks(1, 2), q=after, k=here),
            Region(chunks(2, None), q=at(self.size), k=here),
            Region(chunks(-1, 0), q=here, k=after),
            Region(chunks(None, -1), q=here, k=at(self.size)),
        )

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(3 * lengths.trained // 4, lengths.trained // 8)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        trained = lengths.trained
        sizes = [round(share * trained) for share in (1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)]
        locals_ = [round(share * trained) for share in (1 / 16, 1 / 8, 3 / 16, 1 / 4)]
        fit = [size for size in (*sizes, self.size) if size <= trained]
        return combinations(size=fit, local=(*locals_, self.local))


@part("string", site="remap", paper="An et al. 2024, arXiv:2410.18745")
class String(Remap):
    """STRING: distances of S or more start again from W, i - j - S + W.

    An et al. 2024, "Why Does the Effective Context Length of LLMs Fall Short?". The longest
    distances are rare in training, so they are replaced by shorter ones, inside the trained window;
    the authors advise S of 1/4 to 2/5 of it and W of 128 to 512. The largest distance is L - 1 - S
    + W: it is no extension by itself. Two keys share each distance from W to S. The
    authors' code counts the distance S twice at prefill and makes all scores 1.1434 times as large:
    the preset `string_released` does the latter.
    """

    shift: PositiveInt
    local: PositiveInt = 128

    def check(self) -> None:
        if self.local >= self.shift:
            raise UserError(
                f"string: local must be below shift, but got {self.local} and {self.shift}: a "
                f"third of the trained length and 128 are usual."
            )

    def regions(self) -> tuple[Region, ...]:
        return near_and_far(self.shift, Shift(add=self.local - self.shift))

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        """A third of the trained length, where the largest distance then fits into it."""
        shift = lengths.share(3)
        local = min(128, shift // 4)
        fits = local and lengths.target - shift + local <= lengths.trained
        return [cls(shift, local)] if fits else []

    def grid(self, lengths: Lengths) -> Iterator[Setting]:
        shifts = [round(share * lengths.trained) for share in (1 / 4, 1 / 3, 2 / 5, 1 / 2)]
        for shift in distinct((self.shift, *shifts)):
            fit = [w for w in (128, 256, 512, self.local) if w < shift]
            yield from combinations(shift=[shift], local=fit)


@part("streaming", site="remap", paper="Xiao et al. 2023, arXiv:2309.17453")
class Streaming(Remap):
    """StreamingLLM: the first `sinks` tokens and the last `window`, numbered by their place in the
    cache.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks". Inside the window
    distances are true; a sink at position j is at distance min(i, sinks + window - 1) - j, as
    if the cache were all there is. Memory is constant and generation endless, but the context is
    no longer: evicted tokens are forgotten.
    """

    sinks: PositiveInt
    window: PositiveInt

    def regions(self) -> tuple[Region, ...]:
        capped = Shift(least=self.sinks + self.window - 1)
        return near_and_far(self.window, capped, keys=Area(last=self.sinks))

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        """Four sinks, and a window that fills the rest of the trained length."""
        return [cls(4, lengths.trained - 4)]

    def grid(self, lengths: Lengths) -> Iterator[Setting]:
        for sinks in distinct((1, 4, 16, self.sinks)):
            windows = [*lengths.windows(self.window), lengths.trained - sinks]
            fit = [w for w in windows if w + sinks <= lengths.trained]
            yield from combinations(sinks=[sinks], window=fit)


@part("lm_infinite", site="remap", paper="Han et al. 2023, arXiv:2308.16137")
class LmInfinite(Remap):
    """LM-Infinite: a window of true distances, and a few first tokens that are all at the
    window's edge.

    Han et al. 2023, "LM-Infinite: Zero-Shot Extreme Length Generalization for Large Language
    Models". Λ-shaped mask: the last `window` and the first `globals` tokens; distances are capped
    at the window, min(i - j, w). The authors use the trained length for the window and 10 to 100
    global tokens.
    """

    window: PositiveInt
    globals: PositiveInt = 10

    def regions(self) -> tuple[Region, ...]:
        return near_and_far(self.window, at(self.window), at(0), Area(last=self.globals))

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.share(2))]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        windows = (*lengths.windows(self.window), lengths.trained)
        return combinations(window=windows, globals=(4, 10, 32, 100, self.globals))


@part("dimension_wise", site="remap", paper="Lu et al. 2025, arXiv:2504.18857")
class DimensionWise(Remap):
    """DPE: Self-Extend with a group size of its own for each band of rotary pairs.

    Lu et al. 2025, "Effective Length Extrapolation via Dimension-Wise Positional Embeddings
    Manipulation" (COLM). Beyond the window W, pairs of band g see ⌊i/G_g⌋ - ⌊j/G_g⌋ + W -
    ⌊W/G_g⌋; the bands are equally wide, from the fastest pairs to the slowest. Pairs in `exact`
    see the true distance: the paper keeps 16 of 64 exact, chosen per layer and head; here one
    list serves all heads of a layer. The authors' prefill leaves W/G unfloored, their decoding
    floors it, as this part does: with equal groups it is `self_extend(G, W)`. Site ③, inside
    `rope(remap=…)`.
    """

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
        """Llama-3-8B's groups, scaled by the ratio of the lengths; `grid` is for other models."""
        groups = tuple(max(1, round(g * lengths.ratio / 16)) for g in LLAMA3)
        return [cls(groups, lengths.share(8))]

    def grid(self, lengths: Lengths) -> Iterator[Setting]:
        """Group sizes of one band at a time, powers of two up to four times the ratio, as in the
        authors' detection; and other windows."""
        sizes = [*takewhile(lambda g: g <= 4 * lengths.ratio, (2**n for n in range(20)))]
        for band in range(len(self.groups)):
            for g in sizes:
                yield {"groups": (*self.groups[:band], g, *self.groups[band + 1 :])}
        yield from ({"window": w} for w in lengths.windows(self.window))
