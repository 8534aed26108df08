"""Which values the parameters of each part may take, from the trained length L to the target L'.

Su 2023 (kexue.fm 9708, 9731): a window w of L/8 to 3L/4, and beyond it a factor k such that
w + (L' - 1 - w)/k <= L; half of L is often better. Jin et al. 2024 (Self-Extend): (L - W)·G + W >=
L', better W + (L' - W)/G below 1/2 to 2/3 of L. An et al. 2024 (dual chunk): c <= L. Scaled
frequencies: factors from L'/L to twice that, because the last stretch before the limit is the
worst (kexue.fm 9948). Around each value that a scheme has already, a few nearby ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from longitude.parts import (
    AlibiInterpolated,
    ByParts,
    DualChunk,
    DynamicNtk,
    DynamicYarn,
    Hierarchical,
    LeakyRerope,
    LearnedInterpolated,
    Linear,
    Llama3,
    LmInfinite,
    Ntk,
    NtkAlibi,
    NtkMixed,
    Rerope,
    Rope,
    SelfExtend,
    Stepped,
    Streaming,
    Unscaled,
    Yarn,
)

WINDOWS = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
NEARBY = (0.8, 0.9, 1.1, 1.25)
STRETCH = (1, 1.25, 1.5, 1.75, 2)
Setting = dict[str, Any]  # parameters of a part and their values


@dataclass(frozen=True)
class Span:
    """From the length a model was trained on to the one it shall read."""

    trained: int
    target: int

    @property
    def ratio(self) -> float:
        return self.target / self.trained

    def windows(self, now: int) -> list[int]:
        """Windows inside the trained length, some of them near the one that is set."""
        at = [round(share * self.trained) for share in WINDOWS]
        near = [round(now * step) for step in NEARBY]
        return _distinct(w for w in (*at, now, *near) if 0 < w < self.trained)

    def factors(self, now: float) -> list[float]:
        """From the ratio of the lengths up to twice that."""
        near = [now * step for step in NEARBY]
        values = (*(self.ratio * by for by in STRETCH), now, *near)
        low, high = self.ratio, 2 * self.ratio
        return _distinct(_short(v) for v in values if low - 1e-9 <= v <= high + 1e-9)


def values(part: Any, span: Span) -> list[Setting]:
    """What the rules allow to set in this part, other than as it is; nothing where none varies."""
    grid = GRIDS.get(type(part))
    return [setting for setting in grid(part, span) if changes(part, setting)] if grid else []


def changes(part: Any, setting: Setting) -> int:
    """How many parameters of the part a setting changes."""
    return sum(getattr(part, name) != value for name, value in setting.items())


def _distinct(numbers: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(numbers))


def _short(number: float) -> float:
    """At most four decimals, so that a scheme's text stays short."""
    return round(number, 4)


def _grid(**fields: Iterable[Any]) -> Iterator[Setting]:
    """Every combination of these values."""
    return (dict(zip(fields, chosen, strict=True)) for chosen in product(*fields.values()))


def _rerope(part: Rerope, span: Span) -> Iterator[Setting]:
    yield from _grid(window=span.windows(part.window))


def _leaky(part: LeakyRerope, span: Span) -> Iterator[Setting]:
    for w in span.windows(part.window):
        beyond = span.target - 1 - w
        reaches = [share * span.trained for share in (1 / 2, 3 / 4, 1)]
        least = [beyond / (reach - w) for reach in reaches if reach > w]
        near = [part.factor * step for step in (*NEARBY, 1, 2)]
        rounded = _distinct(math.ceil(k * 100) / 100 for k in (*least, *near) if k >= 1)
        inside = [k for k in rounded if w + beyond / k <= span.trained]
        yield from _grid(window=[w], factor=inside)


def _self_extend(part: SelfExtend, span: Span) -> Iterator[Setting]:
    for w in span.windows(part.window):
        beyond = span.target - w
        reaches = [share * span.trained for share in (1 / 2, 2 / 3, 1)]
        least = [math.ceil(beyond / (reach - w)) for reach in reaches if reach > w]
        groups = _distinct((*least, part.group, part.group - 1, part.group + 1, 2 * part.group))
        inside = [g for g in groups if g > 1 and (span.trained - w) * g + w >= span.target]
        yield from _grid(group=inside, window=[w])


def _dual_chunk(part: DualChunk, span: Span) -> Iterator[Setting]:
    trained = span.trained
    sizes = [round(share * trained) for share in (1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)]
    locals_ = [round(share * trained) for share in (1 / 16, 1 / 8, 3 / 16, 1 / 4)]
    inside = [size for size in (*sizes, part.size) if size <= trained]
    yield from _grid(size=_distinct(inside), local=_distinct((*locals_, part.local)))


def _lm_infinite(part: LmInfinite, span: Span) -> Iterator[Setting]:
    windows = _distinct((*span.windows(part.window), span.trained))
    yield from _grid(window=windows, globals=_distinct((4, 10, 32, 100, part.globals)))


def _streaming(part: Streaming, span: Span) -> Iterator[Setting]:
    for sinks in _distinct((1, 4, 16, part.sinks)):
        windows = [*span.windows(part.window), span.trained - sinks]
        fit = [w for w in windows if w + sinks <= span.trained]
        yield from _grid(sinks=[sinks], window=_distinct(fit))


def _yarn(part: Yarn, span: Span) -> Iterator[Setting]:
    heats = (None, 1, _short(math.sqrt(math.log(span.target) / math.log(span.trained))))
    yield from _grid(
        factor=span.factors(part.factor),
        fast=_distinct((4, 8, 16, 32, 64, part.fast)),
        slow=_distinct((0.5, 1, 2, part.slow)),
        attention_factor=_distinct((*heats, part.attention_factor)),
    )


def _dynamic_yarn(part: DynamicYarn, span: Span) -> Iterator[Setting]:
    fast, slow = (4, 8, 16, 32, 64, part.fast), (0.5, 1, 2, part.slow)
    yield from _grid(fast=_distinct(fast), slow=_distinct(slow))


def _by_parts(part: ByParts | Llama3, span: Span) -> Iterator[Setting]:
    low, high = (0.5, 1, 2, part.low), (4, 8, 16, 32, part.high)
    factors = span.factors(part.factor)
    yield from _grid(factor=factors, low=_distinct(low), high=_distinct(high))


def _ntk_mixed(part: NtkMixed, span: Span) -> Iterator[Setting]:
    power = (0.5, 0.625, 0.75, 1, part.power)
    yield from _grid(factor=span.factors(part.factor), power=_distinct(power))


def _dynamic_ntk(part: DynamicNtk, span: Span) -> Iterator[Setting]:
    yield from _grid(factor=_distinct((1, 1.25, 1.5, 2, 3, 4, part.factor)))


def _stepped(part: Stepped, span: Span) -> Iterator[Setting]:
    kinds = ("yarn", "linear", "ntk", "ntk_mixed", "by_parts")
    yield from _grid(kind=kinds, step=_distinct((0.25, 0.5, 1, 2, part.step)))


def _scaled(part: Any, span: Span) -> Iterator[Setting]:
    yield from _grid(factor=span.factors(part.factor))


def _slopes(part: AlibiInterpolated | NtkAlibi, span: Span) -> Iterator[Setting]:
    """ALiBi reads on without any change: so less than the ratio of the lengths may be best."""
    least = [_short(max(1.0, span.ratio * by)) for by in (0.25, 0.5, 0.75)]
    yield from _grid(factor=_distinct((*least, *span.factors(part.factor))))


def _hierarchical(part: Hierarchical, span: Span) -> Iterator[Setting]:
    yield from _grid(alpha=_distinct((0.1, 0.2, 0.3, 0.4, 0.6, part.alpha)))


def _base(part: Rope, span: Span) -> Iterator[Setting]:
    """A rotation of which nothing else is changed: a larger base, or a smaller one."""
    if part.frequencies == Unscaled() and part.remap is None:
        steps = (0.5, 0.75, 1.5, 2, span.ratio, 2 * span.ratio)
        yield from _grid(base=_distinct(_short(part.base * by) for by in steps))


GRIDS: dict[type, Callable[[Any, Span], Iterator[Setting]]] = {
    Rerope: _rerope,
    LeakyRerope: _leaky,
    SelfExtend: _self_extend,
    DualChunk: _dual_chunk,
    LmInfinite: _lm_infinite,
    Streaming: _streaming,
    Yarn: _yarn,
    DynamicYarn: _dynamic_yarn,
    ByParts: _by_parts,
    Llama3: _by_parts,
    NtkMixed: _ntk_mixed,
    DynamicNtk: _dynamic_ntk,
    Stepped: _stepped,
    Linear: _scaled,
    Ntk: _scaled,
    LearnedInterpolated: _scaled,
    AlibiInterpolated: _slopes,
    NtkAlibi: _slopes,
    Hierarchical: _hierarchical,
    Rope: _base,
}
