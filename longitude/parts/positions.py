"""Position policies: which number each token gets.

Sequential ids are the default. The others draw ids during training, so that a model trained on
short sequences sees large positions: randomized (Ruoss et al. 2023), equal-mean (Su 2023), PoSE
(Zhu et al. 2023). Site ①: `ids(n, rng)`; without a generator, the form used at test time.
"""

from typing import Literal

import torch

from longitude.core.part import Choice, Pos, Positions, part
from longitude.core.validate import PositiveInt, UserError
from longitude.parts.rope import Rope


@part("sequential", site="positions", paper="Vaswani et al. 2017, arXiv:1706.03762")
class Sequential(Positions):
    """Sequential positions: token t has position t.

    The default. Its ids are a `range`, which lets a backend take the fast path without reading a
    tensor.
    """

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        return range(n)


@part("randomized", site="positions", paper="Ruoss et al. 2023, arXiv:2305.16843")
class Randomized(Positions):
    """Randomized positions: n of the first `max` positions, drawn without replacement and sorted.

    Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of
    Transformers". Training sees every position below `max` although its sequences are short;
    queries and keys share one draw. Without a generator the ids are evenly spaced over [0, max),
    Su's test-time form (kexue.fm 9444): ordinary positions 0..n-1 at test time would be a mismatch
    with training.
    """

    max: PositiveInt

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if n > self.max:
            raise UserError(
                f"randomized: {n} tokens do not fit into {self.max} positions: raise max to at "
                f"least {n}."
            )
        if rng is None:
            return torch.arange(n) * self.max // max(n, 1)
        return torch.randperm(self.max, generator=rng, device=rng.device)[:n].sort().values

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(cls(16 * length), Rope())]


@part("equal_mean", site="positions", paper="Su 2023, kexue.fm/archives/9444")
class EqualMean(Positions):
    """Equal-mean random positions: 0..n-1 stretched so that the last position has a random size of
    mean `mean`.

    Su 2023, "Length extrapolation and position robustness" (kexue.fm 9444). Draw N' with mean N =
    `mean`, exponential by default or `max` times a Beta variable, and place the tokens evenly on
    [0, N']. Because the mean is the training length, plain positions 0..n-1 are right at test time.
    Positions are real numbers, so only encodings that are functions of position can take them:
    sinusoidal, RoPE, ALiBi and their kin.
    """

    mean: PositiveInt
    draw: Literal["exponential", "beta"] = "exponential"
    max: int | None = None

    def check(self) -> None:
        if self.draw == "beta" and (self.max is None or self.max <= self.mean):
            raise UserError(
                f"equal_mean: draw='beta' needs max above mean={self.mean}, but got {self.max}: "
                f"give the longest length to cover, as in max={8 * self.mean}."
            )

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            return range(n)
        u = torch.rand((), generator=rng, device=rng.device, dtype=torch.float64)
        # both laws by inverting their distribution function; Beta(1, b) has mean 1 / (1 + b)
        if self.draw == "exponential" or self.max is None:
            end = -torch.log1p(-u) * self.mean
        else:
            end = self.max * (1 - (1 - u) ** (1 / (self.max / self.mean - 1)))
        return torch.linspace(0, 1, n, dtype=torch.float64, device=rng.device) * end

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(cls(length), Rope())]


@part("pose", site="positions", paper="Zhu et al. 2023, arXiv:2309.10400")
class Pose(Positions):
    """PoSE: positional skip-wise training. Short sequences whose chunks are moved apart.

    Zhu et al. 2023, "PoSE: Efficient Context Window Extension of LLMs via Positional Skip-wise
    Training". The n tokens are cut into `chunks` consecutive pieces; each piece after the first is
    moved on by a random skip. Skips never shrink, ids inside a piece stay consecutive, and the last
    position stays below `target`: a training window of n tokens then covers every relative distance
    of the target window. Plain ids at test time.
    """

    target: PositiveInt
    chunks: PositiveInt = 2

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            return range(n)
        if n > self.target or n < self.chunks:
            raise UserError(
                f"pose: {n} tokens do not fit {self.chunks} chunks below position {self.target}: "
                f"train on {self.chunks} to {self.target} tokens."
            )
        device, pieces = rng.device, self.chunks - 1
        cuts = torch.randperm(n - 1, generator=rng, device=device)[:pieces].sort().values + 1
        skips = (
            torch.randint(self.target - n + 1, (pieces,), generator=rng, device=device)
            .sort()
            .values
        )
        tokens = torch.arange(n, device=device)
        piece = torch.searchsorted(cuts, tokens, right=True)
        return tokens + torch.cat([skips.new_zeros(1), skips])[piece]

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(cls(16 * length), Rope())]
