"""Position policies: which number each token gets.

Sequential ids are the default. The others draw ids during training, so that a model trained on
short sequences sees large positions: randomized (Ruoss et al. 2023), equal-mean (Su 2023), PoSE
(Zhu et al. 2023), E2-LLM (Liu et al. 2024), CREAM (Wu et al. 2024), random floats (Shimizu et al.
2026) and random steps (Pal et al. 2023). Site ①: `ids(n, rng)`; without a generator, the form used
at test time.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from longitude.core.part import Choice, Pos, Positions, part
from longitude.core.validate import PositiveFloat, PositiveInt, UserError
from longitude.parts.frequencies import Linear
from longitude.parts.rope import Rope


def with_rope(times: int) -> Any:
    """The `training` method of a policy with RoPE, whose argument is `times` the trained length."""

    def training(cls: Any, length: int) -> list[Choice]:
        return [(cls(times * length), Rope())]

    return classmethod(training)


def _uniform(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=rng, device=rng.device, dtype=torch.float64)


def _integers(rng: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers from low to high, both included."""
    return torch.randint(low, high + 1, shape, generator=rng, device=rng.device)


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

    training = with_rope(16)


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
        u = _uniform(rng)
        # both are drawn by inverting their distribution function; Beta(1, b) has mean 1 / (1 + b)
        if self.draw == "exponential" or self.max is None:
            end = -torch.log1p(-u) * self.mean
        else:
            end = self.max * (1 - (1 - u) ** (1 / (self.max / self.mean - 1)))
        return torch.linspace(0, 1, n, dtype=torch.float64, device=rng.device) * end

    training = with_rope(1)


@part("pose", site="positions", paper="Zhu et al. 2023, arXiv:2309.10400")
class Pose(Positions):
    """PoSE: positional skip-wise training on short sequences whose chunks are moved apart.

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
        skips = _integers(rng, 0, self.target - n, pieces).sort().values
        tokens = torch.arange(n, device=device)
        piece = torch.searchsorted(cuts, tokens, right=True)
        return tokens + torch.cat([skips.new_zeros(1), skips])[piece]

    training = with_rope(16)


@part("e2_llm", site="positions", paper="Liu et al. 2024, arXiv:2401.06951")
class E2Llm(Positions):
    """E2-LLM: a random interpolation factor g and a random offset t for each training sequence.

    Liu et al. 2024, "E2-LLM: Efficient and Extreme Length Extension of Large Language Models". g is
    uniform over 1 … `max_factor`, t over 0 … g L - n, L the window: token m takes (m + t) / g, the
    first four m / g. So the window is trained at every density of positions. A text of n
    tokens, if longer than the window, is read with g = n / L and t = 0, which moves all ids as it
    grows: fix n for the life of a cache, or read with rope(frequencies=linear(g)). `scale`
    multiplies the ids, for training under linear(scale).
    """

    window: PositiveInt
    max_factor: PositiveInt = 20
    scale: PositiveFloat = 1

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            if n <= self.window and self.scale == 1:
                return range(n)
            shrunk = min(1.0, self.window / max(n, 1))
            return torch.arange(n, dtype=torch.float64) * shrunk * self.scale
        if n > self.window:
            raise UserError(
                f"e2_llm: {n} tokens do not fit into a window of {self.window}: train on at most "
                f"{self.window}."
            )
        g = int(_integers(rng, 1, self.max_factor))
        tokens = torch.arange(n, dtype=torch.float64, device=rng.device)
        offset = _integers(rng, 0, g * self.window - n)
        return (tokens + torch.where(tokens > 3, offset, 0)) / g * self.scale

    training = with_rope(1)


@part("cream", site="positions", paper="Wu et al. 2024, arXiv:2406.07138")
class Cream(Positions):
    """CREAM: head, middle and tail of a short sequence at the start, in the middle and at the end
    of the target.

    Wu et al. 2024, "An Efficient Recipe for Long Context Extension via Middle-Focused Positional
    Encoding". Of n tokens, s = target / n, head and tail have n/3 or 4 s tokens (a coin decides);
    the tail takes the last ids below the target. The middle, m tokens in a row, ends at e, uniform
    from head + (m - 1) α to α n - tail - 1, where 2 α lies in [2, 2 s] by a truncated normal
    distribution around its middle. The published code fixes mean 9 and deviation 3 for s = 8; here
    they are 1 + s and 3 (s - 1) / 7. Use it with rope(frequencies=linear(s)); plain ids at test
    time.
    """

    target: PositiveInt

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            return range(n)
        if n > self.target or n < 3:
            raise UserError(
                f"cream: {n} tokens do not make head, middle and tail below position "
                f"{self.target}: train on 3 to {self.target} tokens."
            )
        s, device = self.target / n, rng.device
        short = _integers(rng, 0, 1) and 4 * int(s) < n / 3
        head = tail = 4 * int(s) if short else n // 3
        middle, alpha = n - head - tail, _middle_factor(s, rng)
        low, high = int(head + (middle - 1) * alpha), int(alpha * n) - tail - 1
        end = int(_integers(rng, low, max(low, high)))
        starts = ((0, head), (end - middle + 1, middle), (self.target - tail, tail))
        return torch.cat([torch.arange(at, at + size, device=device) for at, size in starts])

    @classmethod
    def training(cls, length: int) -> list[Choice]:
        return [(cls(8 * length), Rope(frequencies=Linear(8)))]


def _middle_factor(s: float, rng: torch.Generator) -> float:
    """α: half a normal variable between 2 and 2 s, by inverting its distribution function."""
    if s <= 1:
        return 1.0
    normal = torch.distributions.Normal(1 + s, 3 * (s - 1) / 7)
    low, high = normal.cdf(torch.tensor([2.0, 2 * s], dtype=torch.float64)).tolist()
    drawn = normal.icdf(low + (high - low) * _uniform(rng).cpu())
    return float(drawn.clamp(2.0, 2 * s)) / 2


@part("random_float", site="positions", paper="Shimizu et al. 2026, arXiv:2602.14050")
class RandomFloat(Positions):
    """Random Float Sampling: n real positions drawn from [0, L) and sorted, L the trained length.

    Shimizu et al. 2026. The paper draws from [0, 1); the multiple L is ours, so that distances keep
    the size that RoPE and ALiBi are made for. A text of n tokens is read at (i - ½) L / max(L, n),
    i = 1 … n: past the trained length the denominator moves all ids, so fix n for the life of a
    cache.
    """

    train: PositiveInt

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is not None:
            return _uniform(rng, n).sort().values * self.train
        return (torch.arange(n, dtype=torch.float64) + 0.5) * self.train / max(self.train, n)

    training = with_rope(1)


@part("random_steps", site="positions", paper="Pal et al. 2023, arXiv:2308.10882")
class RandomSteps(Positions):
    """Random steps: each token is a random step after the previous one, uniform on [0, 2), one on
    average.

    Pal et al. 2023, "Giraffe: Adventures in Expanding Context Lengths in LLMs". Ids that run past
    `max` are all scaled down to end there. Plain ids at test time.
    """

    max: PositiveInt

    def ids(self, n: int, *, rng: torch.Generator | None = None) -> Pos:
        if rng is None:
            return range(n)
        ids = (2 * _uniform(rng, n)).cumsum(0)
        return ids * min(1.0, self.max / float(ids[-1])) if n else ids

    training = with_rope(2)
