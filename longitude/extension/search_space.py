"""The neighbourhood of a scheme: the same parts with other parameters, and logn on or off.

A neighbour changes one part or several, each to a setting of the part's own `grid`
(`core/part.py`); half of the draws change a single parameter, so that the surroundings of a good
scheme are also examined closely. If layers differ, those that see the full context change and those
with a window do not. In a split both schemes can change, and so can its place.

Factors for each pair of dimensions: θ_i / λ_i with λ_0 <= λ_1 <= …, searched and written as
`longrope`, which every runtime can serve.

After Ding et al. 2024, "LongRoPE" (arXiv:2402.13753): the search starts from linear, NTK and YaRN
and keeps the factors non-decreasing. The paper evolves every factor separately over thousands of
forwards; this search is small. Curves of log λ are bent at a few knots, linearly in between, or
slid along the pairs, or two of them are blended; successive halving selects, and steps shrink from
generation to generation. The temperature is searched, too. Short and long factors are equal, so
nothing switches with the length. The paper also leaves the first few tokens uninterpolated; no
runtime has a setting for that.

According to LongRoPE2 (Shang et al. 2025, arXiv:2502.20082), slow pairs are trained too little:
from a critical pair c on, the factors are non-decreasing, from the ratio s of the lengths to 2s;
before it, NTK: λ_i = λ_c^(i/c). In theory c is the first pair that completes no turn in the trained
length; the actual one is searched between that and the first that completes fewer than ten. The
fourth start has c in the middle, where the paper found it for both of its models (25 in 19 to 31,
30 in 24 to 35), and half of all children are brought into that form, each with another c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

from longitude.core.lengths import Lengths, Setting, rounded
from longitude.core.part import optional
from longitude.core.scheme import Layers, Scheme, Split
from longitude.core.text import dump, parse
from longitude.core.validate import UserError
from longitude.parts import Linear, LogN, LongRope, Ntk, Rope, Unscaled, Yarn

TRIES = 10  # draws per neighbour; a small space runs out of new ones
SHARES = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4)  # share of the layers below a split
KNOTS = 7
STARTS = 4  # linear, NTK, YaRN and LongRoPE2
SLIDES = 0.25  # the share of bends that move the full curve along the pairs
WARM = 0.04  # the standard deviation of a step in the temperature


@dataclass(frozen=True)
class Axis:
    """A part or a split that can vary, with all settings that it may take and those that change
    one parameter. An axis without settings switches logn off, or on if `part` is None."""

    part: Any
    settings: Sequence[Setting]
    single: Sequence[Setting] = ()

    def drawn(self, rng: Random, lengths: Lengths) -> Any:
        """A random replacement for the part; None removes it."""
        if not self.settings:
            return LogN(lengths.trained) if self.part is None else None
        single = self.single and rng.random() < 0.5
        return replace(self.part, **rng.choice(self.single if single else self.settings))


def starts(leaders: Sequence[str], trained: int, target: int) -> list[str]:
    """The distinct leaders that can vary, as texts in their order."""
    lengths, texts = Lengths(trained, target), []
    for leader in leaders:
        try:
            scheme = parse(leader)
        except UserError:
            continue
        if axes(scheme, lengths):
            texts.append(dump(scheme))
    return list(dict.fromkeys(texts))


def neighbours(scheme_text: str, trained: int, target: int, rng: Random, count: int) -> list[str]:
    """Up to `count` distinct schemes near this one; fewer if there are no more."""
    scheme, lengths = parse(scheme_text), Lengths(trained, target)
    around, texts = axes(scheme, lengths), dict[str, None]()
    count = min(count, math.prod(len(axis.settings or "1") + 1 for axis in around) - 1)
    for _ in range(TRIES * count):
        if len(texts) >= count:
            break
        changed: Scheme | Layers | None = scheme
        try:
            for axis in rng.sample(around, rng.randint(1, len(around))):
                changed = _replaced(changed, axis.part, axis.drawn(rng, lengths))
        except UserError:  # these parts don't go together
            continue
        texts[dump(changed)] = None
    return list(texts)


def axes(scheme: Scheme | Layers, lengths: Lengths) -> list[Axis]:
    """What can vary in a scheme: parts with a grid, and logn if the scheme has no other scale."""
    wide = _full_context_layers(scheme)
    parts, axes = dict[Any, None](), []
    for layer in wide:
        rope = layer.rotary
        parts |= dict.fromkeys([*layer.parts, *((rope.frequencies, rope.remap) if rope else ())])
    for part in parts:
        changes = [  # number of parameters that each setting changes
            (sum(getattr(part, name) != value for name, value in setting.items()), setting)
            for setting in optional(part, "grid", lengths)
        ]
        if settings := [setting for count, setting in changes if count]:
            axes.append(Axis(part, settings, [s for count, s in changes if count == 1]))
    if isinstance(scheme, Split):
        others = [rounded(share) for share in SHARES if rounded(share) != scheme.share]
        axes.append(Axis(scheme, [{"share": share} for share in others]))
    scales = list(dict.fromkeys(part for layer in wide for part in layer.scale))
    return [*axes, *(Axis(p, ()) for p in scales or [None] if p is None or isinstance(p, LogN))]


def _full_context_layers(scheme: Scheme | Layers) -> tuple[Scheme, ...]:
    """The layers that see the full context; all of them if none does, or in a split."""
    if isinstance(scheme, Split):
        return scheme.schemes
    return tuple(layer for layer in scheme.schemes if not layer.windowed) or scheme.schemes


def _replaced(scheme: Scheme | Layers, old: Any, new: Any) -> Scheme | Layers:
    """Replace one part of a scheme by another; None stands for no part. If `new` is a split, only
    its share is taken."""
    if isinstance(scheme, Layers):
        if isinstance(new, Split):
            return replace(scheme, share=new.share)  # type: ignore[call-arg]
        wide = _full_context_layers(scheme)
        layers = (_replaced(s, old, new) if s in wide else s for s in scheme.schemes)
        return replace(scheme, schemes=tuple(layers))
    parts = [_within(part, old, new) for part in scheme.parts]
    added = [new] if old is None else []
    return Scheme.of(*(part for part in (*parts, *added) if part is not None))


def _within(part: Any, old: Any, new: Any) -> Any:
    if part == old:
        return new
    if not isinstance(part, Rope) or old is None:
        return part
    if part.frequencies == old:
        return replace(part, frequencies=new)
    return replace(part, remap=new) if part.remap == old else part


# factors per dimension


@dataclass(frozen=True)
class Curve:
    """ln λ of each pair, non-decreasing, and the attention factor on each of q and k."""

    logs: tuple[float, ...]
    attention: float


def factor_starts(rope: Rope, head_dim: int, trained: int, target: int) -> dict[str, str]:
    """Linear, NTK, YaRN and LongRoPE2 on top of the model's own frequencies. Maps each one, written
    as factors, to its short name if the model's own frequencies are unscaled, else to itself."""
    ratio, own = round(target / trained, 4), own_curve(rope, head_dim, trained)
    kinds = (Linear(ratio), Ntk(ratio), Yarn(ratio, original=trained))
    texts = {}
    for kind in kinds:
        scaled = own_curve(replace(rope, frequencies=kind), head_dim, target)
        logs = [a + b for a, b in zip(own.logs, scaled.logs, strict=True)]
        curve = monotone(logs, own.attention * scaled.attention, math.inf)
        text, plain = written(rope, curve, trained, target), rope.frequencies == Unscaled()
        named = dump(Scheme.of(replace(rope, frequencies=kind)))
        texts[text] = named if plain else text
    middle = -(-sum(critical_pairs(rope, head_dim, trained)) // 2)
    curve = around_critical(own, own, middle, ratio)
    factor = own.attention * math.sqrt(1 + math.log(ratio) / math.log(trained))  # longrope's rule
    text = written(rope, replace(curve, attention=factor), trained, target)
    return texts | {text: text}


def critical_pairs(rope: Rope, head_dim: int, trained: int) -> tuple[int, int]:
    """The first pairs that complete fewer than ten turns, and no turn, in the trained length."""
    dim = rope.dim(head_dim)
    turns = trained * rope.inv_freq(dim, trained) / (2 * math.pi)
    below_ten, below_one = (min(max(1, int((turns > n).sum())), dim // 2 - 1) for n in (10, 1))
    return below_ten, below_one


def around_critical(curve: Curve, own: Curve, at: int, ratio: float) -> Curve:
    """A curve in LongRoPE2's form, on top of the model's own: from the critical pair `at` on,
    non-decreasing factors between the ratio and twice the ratio; before it, NTK."""
    least, most = math.log(ratio), math.log(2 * ratio)
    added = [log - base for log, base in zip(curve.logs, own.logs, strict=True)]
    slow = [*accumulate((min(max(log, least), most) for log in added[at:]), max)]
    fast = [slow[0] * pair / at for pair in range(at)]
    logs = [base + log for base, log in zip(own.logs, [*fast, *slow], strict=True)]
    return monotone(logs, curve.attention, math.inf)


def scalable(rope: Rope, head_dim: int, length: int) -> bool:
    """Whether there are two pairs or more, as NTK needs, and every one of them rotates."""
    dim = rope.dim(head_dim)
    return dim > 2 and bool((rope.inv_freq(dim, length) > 0).all())


def own_curve(rope: Rope, head_dim: int, length: int) -> Curve:
    """The curve of the factors by which a rotation divides RoPE's frequencies."""
    if not scalable(rope, head_dim, length):
        raise UserError(
            f"factors can't scale {rope} in heads of {head_dim}: it has a single pair, or pairs "
            f"that never rotate; search the parameters of other schemes."
        )
    dim = rope.dim(head_dim)
    scaled = rope.inv_freq(dim, length)
    logs = (Unscaled().inv_freq(dim, rope.base, length) / scaled).log().tolist()
    return Curve(tuple(logs), math.sqrt(rope.frequencies.gain(length)))


def written(rope: Rope, curve: Curve, trained: int, target: int) -> str:
    """A curve as the text of a scheme. Four decimals keep it short; rounding keeps the order."""
    factors = tuple(round(math.exp(log), 4) for log in curve.logs)
    ratio, attention = round(target / trained, 4), round(curve.attention, 4)
    scaled = LongRope(factors, factors, original=trained, factor=ratio, attention_factor=attention)
    return dump(Scheme.of(replace(rope, frequencies=scaled)))


def curve_of(text: str) -> Curve:
    """The curve of a scheme that `written` wrote."""
    scheme = parse(text)
    assert isinstance(scheme, Scheme) and scheme.rotary is not None
    factors = scheme.rotary.frequencies
    assert isinstance(factors, LongRope)
    return Curve(tuple(map(math.log, factors.long)), factors.attention())


def monotone(logs: Sequence[float], attention: float, most: float) -> Curve:
    """The least non-decreasing curve above these numbers, from 0 (no scaling) to `most`."""
    return Curve(tuple(min(log, most) for log in accumulate((0.0, *logs), max))[1:], attention)


def child(parents: Sequence[Curve], step: float, most: float, rng: Random) -> Curve:
    """A blend of two parents, a bent parent or a bent blend; earlier parents are drawn more often.
    Bending slides a curve along the pairs, or moves it at one knot or at all of them; half of the
    moves change the temperature as well."""
    curve = parents[int(len(parents) * rng.random() ** 2)]
    if len(parents) > 1 and rng.random() < 0.3:
        (a, b), share = rng.sample(parents, 2), rng.random()
        mix = [share * x + (1 - share) * y for x, y in zip(a.logs, b.logs, strict=True)]
        curve = Curve(tuple(mix), share * a.attention + (1 - share) * b.attention)
        if rng.random() < 0.5:
            return curve
    pairs = np.arange(len(curve.logs))
    if rng.random() < SLIDES:
        slid = pairs - rng.gauss(0, step * len(pairs) / 4)
        return monotone(np.interp(slid, pairs, curve.logs).tolist(), curve.attention, most)
    only = rng.choice((None, *range(KNOTS)))
    offsets = [rng.gauss(0, step) if only in (None, knot) else 0.0 for knot in range(KNOTS)]
    moves = np.interp(np.linspace(0, KNOTS - 1, len(pairs)), range(KNOTS), offsets)
    warmer = rng.gauss(0, WARM) if rng.random() < 0.5 else 0.0
    logs = (np.array(curve.logs) + moves).tolist()
    return monotone(logs, max(0.5, curve.attention + warmer), most)
