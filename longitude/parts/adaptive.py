"""Remaps that adapt to the length by the query's own position: AdaGroPE, LaMPE, llama.cpp's groups.

They compress distances more the longer the text is. The length is the query's own position, in
steps (`RowSteps`), so a cache stays valid and decoding equals prefill. Site ③, in `rope(remap=…)`.
"""

import math
from collections.abc import Iterable, Iterator

from longitude.core.lengths import Lengths, Setting, combinations
from longitude.core.part import Choice, Region, Remap, part
from longitude.core.region import Area, Shift
from longitude.core.validate import NonNegativeInt, PositiveFloat, PositiveInt, UserError
from longitude.parts.dynamic import RowSteps


@part("adagrope", site="remap", paper="Xu et al. 2025, ACL, aclanthology.org/2025.acl-long.28")
class AdaGroPE(Remap, RowSteps):
    """AdaGroPE: P positions are reused the more often the farther a key is, and no more than the
    length needs.

    Xu et al. 2025, "AdaGroPE". ⌊ρP⌋ positions are exact, the next ⌊ρP/2⌋ stand for 2 distances
    each, the next ⌊ρP/4⌋ for 4, and so on; the rest stand for n, the least that reaches the query:
    nP - Σ (n - k) ⌊ρP/k⌋ tokens over powers of two k < n. The paper takes n from the length of the
    input; here it follows from the query's own position, so it differs between rows. Query and key
    are floored separately, as in Self-Extend. P is the trained length for perplexity and half of it
    for tasks; ρ is 1/4. No code was published: this follows the paper's description.
    """

    positions: PositiveInt
    share: float = 0.25

    def check(self) -> None:
        if not 0 < self.share < 0.5 or self.share * self.positions < 1:
            raise UserError(
                f"adagrope: share must lie between 0 and 1/2 and leave a position exact, but got "
                f"{self.share} of {self.positions}: 0.25 is the paper's."
            )

    def levels(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield (k, count) for powers of two k < n: `count` positions are used k times each."""
        k = 1
        while k < n and (count := int(self.share * self.positions / k)):
            yield k, count
            k *= 2

    def end(self, b: int) -> int:
        n = b + 1
        return n * self.positions - sum((n - k) * count for k, count in self.levels(n))

    def band(self, b: int) -> tuple[Region, ...]:
        regions, true, effective = [], 0, 0
        for k, count in (*self.levels(b + 1), (b + 1, None)):
            stop = None if count is None else true + k * count
            if k == 1:
                regions.append(Region(Area(lo=None if stop is None else 1 - stop, hi=stop)))
            else:
                q = Shift(divide=k, floor=True, add=effective - -(-true // k))
                key = Shift(divide=k, floor=True)
                ahead = Area(lo=None if stop is None else 1 - stop, hi=1 - true)
                regions += [Region(Area(lo=true, hi=stop), q, key), Region(ahead, key, q)]
            true, effective = true + k * (count or 0), effective + (count or 0)
        return tuple(regions)

    def regions(self) -> tuple[Region, ...]:
        return self.band(0)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(max(4, lengths.share(2)))]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        positions = [round(share * lengths.trained) for share in (1 / 4, 1 / 2, 3 / 4, 1)]
        fit = [p for p in (*positions, self.positions) if p >= 8]
        return combinations(positions=fit, share=(1 / 8, 1 / 4, 3 / 8, self.share))


@part("lampe", site="remap", paper="Zhang et al. 2025, arXiv:2508.02308")
class Lampe(Remap, RowSteps):
    """LaMPE: a text of l tokens is mapped to m = M / (1 + e^-(a l + b)) positions, at full
    resolution near and at the far end, compressed between.

    Zhang et al. 2025, "LaMPE: Length-aware Multi-grained Positional Encoding". With r = i - j: r up
    to `head` stays; from l - `tail` on it is m - l + r; between them head + c (r - head), c = (m -
    head - tail) / (l - head - tail). The paper rounds that down and the authors' code rounds query
    and key separately; here it keeps its fraction, so that a distance has one value. The length l
    is the query's own position, rounded up to a multiple of `step`. a, b and M are fitted to a
    model. As in the code, all distances are true below 2·head, and m is at least head + tail + 1.
    """

    reach: PositiveInt
    rate: PositiveFloat
    offset: float
    head: PositiveInt
    tail: NonNegativeInt = 8
    step: PositiveInt = 4096

    def mapped(self, length: int) -> int:
        """The positions that a text of this length is mapped to."""
        positions = self.reach / (1 + math.exp(min(700.0, -(self.rate * length + self.offset))))
        return max(int(positions), self.head + self.tail + 1)

    def end(self, b: int) -> int:
        return (b + 1) * self.step

    def band(self, b: int) -> tuple[Region, ...]:
        length, head, tail = self.end(b), self.head, self.tail
        mapped = self.mapped(length)
        if length < 2 * head or mapped >= length:
            return (Region(),)
        far, divide = length - tail, (length - head - tail) / (mapped - head - tail)
        near, middle = Area(lo=-head, hi=head + 1), Area(lo=head + 1, hi=far)
        q, k = Shift(divide=divide, add=head - head / divide), Shift(divide=divide)
        last = Shift(add=mapped - length)
        return (
            Region(near),
            Region(middle, q, k),
            Region(Area(lo=far), last),
            Region(Area(lo=1 - far, hi=-head), k, q),
            Region(Area(hi=1 - far), k=last),
        )

    def regions(self) -> tuple[Region, ...]:
        return (Region(),)

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        heads = [lengths.share(n) for n in (16, 8, 4)]
        reach = [round(share * lengths.trained) for share in (1 / 2, 5 / 8, 3 / 4, 1)]
        return combinations(reach=(*reach, self.reach), head=(*heads, self.head))


@part("group_attention", site="remap", paper="ggerganov 2024, llama.cpp, PR 4815 and 4886")
class GroupAttention(Remap, RowSteps):
    """llama.cpp's group attention: each full block of w tokens is squeezed to w/n positions.

    The options `--grp-attn-n` and `--grp-attn-w` of llama-completion and llama-passkey. Whenever w
    more tokens are in the cache, their positions are divided by n and later ones move up. So a
    query of block c = ⌊i/w⌋ has position i - c (w - w/n), keys of its own block their true distance
    and keys j of earlier blocks position ⌊j/n⌋. That is not Self-Extend: exact distances reach back
    to the start of the block, 0 to w - 1 tokens, and do not slide. llama.cpp divides between
    batches, so it computes this if the batch size (`-b`) divides w.
    """

    group: PositiveInt
    window: PositiveInt

    def check(self) -> None:
        if self.window % self.group:
            raise UserError(
                f"group_attention: the window must be a multiple of the group, but got "
                f"{self.window} and {self.group}: llama.cpp asks for that too."
            )

    def end(self, b: int) -> int:
        return (b + 1) * self.window

    def band(self, b: int) -> tuple[Region, ...]:
        start, squeezed = b * self.window, b * (self.window - self.window // self.group)
        earlier = Area(last=start), Shift(add=-squeezed), Shift(divide=self.group, floor=True)
        return (Region(Area(first=start)), Region(*earlier)) if b else (Region(),)

    def regions(self) -> tuple[Region, ...]:
        return self.band(0)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        """The trained length must hold T/G positions and one block: at most about half of it, and
        a quarter."""
        group = max(2, 2 ** (int(2 * lengths.ratio) - 1).bit_length())
        return [cls(group, max(1, lengths.share(4) // group) * group)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        windows = [max(1, w // self.group) * self.group for w in lengths.windows(self.window)]
        return combinations(window=windows)
