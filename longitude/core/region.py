"""Areas of the (i, j) plane, and the positions that queries and keys take there.

Every mask and every remap of rotary positions partitions the plane of pairs (i, j). A piece is a
value, not a closure, so that a backend can inspect it: an `Area` is a set of pairs, a `Shift` maps
positions; a `Region` (part.py) joins one area with the shifts of its queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from longitude.core.validate import UserError

FAR = 2**62  # "no bound" in integer arithmetic; larger than any position


def _larger(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


@dataclass(frozen=True)
class Chunks:
    """Pairs whose chunks (of `size` positions) lie `lo <= i//size - j//size < hi` apart."""

    size: int
    lo: int | None = None
    hi: int | None = None


@dataclass(frozen=True)
class Area:
    """Pairs with `lo <= i-j < hi`, `first <= j < last` and `top <= i < bottom`, inside all
    `chunks`. None is no bound. For each query position an area is one interval of key positions."""

    lo: int | None = None
    hi: int | None = None
    first: int | None = None
    last: int | None = None
    top: int | None = None
    bottom: int | None = None
    chunks: tuple[Chunks, ...] = ()

    def __and__(self, other: Area) -> Area:
        return Area(
            _larger(self.lo, other.lo),
            _smaller(self.hi, other.hi),
            _larger(self.first, other.first),
            _smaller(self.last, other.last),
            _larger(self.top, other.top),
            _smaller(self.bottom, other.bottom),
            self.chunks + tuple(c for c in other.chunks if c not in self.chunks),
        )

    @property
    def empty(self) -> bool:
        """Whether the bounds alone exclude every pair."""
        bounds = ((self.lo, self.hi), (self.first, self.last), (self.top, self.bottom))
        if any(a is not None and b is not None and a >= b for a, b in bounds):
            return True
        past = self.lo is not None and self.lo >= 0
        future = self.hi is not None and self.hi <= 1
        for c in self.chunks:  # a key of a later chunk lies ahead, one of an earlier chunk behind
            ahead, behind = c.hi is not None and c.hi <= 0, c.lo is not None and c.lo > 0
            if (past and ahead) or (future and behind):
                return True
        return False

    @property
    def bounded(self) -> bool:
        """Whether the number of keys that a query sees has a bound, however late the query."""
        bounds = [self.hi, self.last, self.bottom, *(c.hi for c in self.chunks)]
        return any(bound is not None for bound in bounds)

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether each pair lies in the area; i and j broadcast."""
        tests = [*_between(i - j, self.lo, self.hi)] if (self.lo, self.hi) != (None, None) else []
        tests += [*_between(j, self.first, self.last), *_between(i, self.top, self.bottom)]
        for c in self.chunks:
            tests += _between(i // c.size - j // c.size, c.lo, c.hi)
        tests = tests or [torch.ones((), dtype=torch.bool, device=i.device)]
        return reduce(and_, tests).expand(_shape(i, j))

    def interval(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """The key positions start <= j < stop that each query position sees, from position 0 on."""
        starts, stops = self._bounds(i)
        start = reduce(torch.maximum, starts, torch.full_like(i, max(self.first or 0, 0)))
        last = torch.full_like(i, FAR if self.last is None else self.last)
        stop = reduce(torch.minimum, stops, last)
        everywhere = torch.ones_like(i, dtype=torch.bool)
        inside = reduce(and_, _between(i, self.top, self.bottom), everywhere)
        return start, torch.where(inside, torch.maximum(start, stop), start)

    def interval_of(self, i: int) -> tuple[int, int]:
        """The same for one query position, in integers, without the lower bound 0 on keys."""
        if not all(_between(i, self.top, self.bottom)):
            return 0, 0
        starts, stops = self._bounds(i)
        starts.append(-FAR if self.first is None else self.first)
        stops.append(FAR if self.last is None else self.last)
        return max(starts), min(stops)

    def _bounds(self, i: Any) -> tuple[list[Any], list[Any]]:
        """All lower and upper bounds on the keys of a query position, or of a tensor of them."""
        starts = [] if self.hi is None else [i - self.hi + 1]
        stops = [] if self.lo is None else [i - self.lo + 1]
        for c in self.chunks:
            starts += [] if c.hi is None else [(i // c.size - c.hi + 1) * c.size]
            stops += [] if c.lo is None else [(i // c.size - c.lo + 1) * c.size]
        return starts, stops

    def reaches(self, i: tuple[float, float], j: tuple[float, float]) -> bool:
        """Whether a query i[0] … i[1] may see a key j[0] … j[1]. False is certain, True is not."""
        bounds = [
            (i[0] - j[1], i[1] - j[0], self.lo, self.hi),
            (*i, self.top, self.bottom),
            (*j, self.first, self.last),
            *((i[0] // c.size - j[1] // c.size, i[1] // c.size - j[0] // c.size, c.lo, c.hi)
              for c in self.chunks),
        ]  # fmt: skip
        return all(
            (lo is None or greatest >= lo) and (hi is None or least < hi)
            for least, greatest, lo, hi in bounds
        )

    def ever(self, now: Tensor, j: Tensor) -> Tensor:
        """Whether a query at `now` or later can still see key j: what a cache must keep."""
        # for each key, too, an area is one interval of query positions
        starts = [now] + ([] if self.lo is None else [j + self.lo])
        stops = [torch.full_like(j, FAR)] + ([] if self.hi is None else [j + self.hi])
        for c in self.chunks:
            starts += [] if c.lo is None else [(j // c.size + c.lo) * c.size]
            stops += [] if c.hi is None else [(j // c.size + c.hi) * c.size]
        start = reduce(torch.maximum, starts).clamp(min=-FAR if self.top is None else self.top)
        stop = reduce(torch.minimum, stops).clamp(max=FAR if self.bottom is None else self.bottom)
        return reduce(and_, _between(j, self.first, self.last), start < stop)


EVERYWHERE = Area()


def _between(x: Any, lo: int | None, hi: int | None) -> list[Any]:
    return ([x >= lo] if lo is not None else []) + ([x < hi] if hi is not None else [])


def meet(*unions: tuple[Area, ...]) -> tuple[Area, ...]:
    """The intersection of unions of areas, again a union; disjoint if each union was."""
    areas = (Area(),)
    for union in unions:
        areas = tuple(both for a, b in product(areas, union) if not (both := a & b).empty)
    return areas


def visible(areas: tuple[Area, ...], i: Tensor, j: Tensor) -> Tensor:
    """Whether each pair lies in one of the areas."""
    none = torch.zeros((), dtype=torch.bool, device=i.device)
    masks = [area.visible(i, j) for area in areas] or [none.expand(_shape(i, j))]
    return reduce(or_, masks)


def _shape(i: Tensor, j: Tensor) -> torch.Size:
    """The broadcast shape. torch.broadcast_shapes is Python: slower than testing a small area."""
    return i.shape if i.shape == j.shape else torch.broadcast_tensors(i, j)[0].shape


@dataclass(frozen=True)
class Shift:
    """Maps a position p to min((p mod modulo) / divide [floored] + add, least). `divide=inf`
    maps every position to `add`: the constant is the limit of ever larger divisors, just as ReRoPE
    is the limit of leaky ReRoPE."""

    modulo: int | None = None
    divide: float = 1
    floor: bool = False
    add: float = 0
    least: float | None = None

    def __call__(self, pos: Tensor) -> Tensor:
        """Positions after the shift, in float64."""
        p = pos.to(torch.float64)
        p = p if self.modulo is None else p.remainder(self.modulo)
        p = p if self.divide == 1 else p / self.divide
        p = p.floor() if self.floor else p
        p = p if self.add == 0 else p + self.add
        return p if self.least is None else p.clamp(max=self.least)

    def by_pair(self, pos: Tensor, pairs: int) -> Tensor:
        """The same with a last axis of size 1, because all rotary pairs take one position."""
        return self(pos)[..., None]


@dataclass(frozen=True)
class PairShifts:
    """A separate shift for each of several equal bands of rotary pairs, the fastest first. The
    pairs listed in `exact` keep their positions."""

    bands: tuple[Shift, ...]
    exact: tuple[int, ...] = ()

    def by_pair(self, pos: Tensor, pairs: int) -> Tensor:
        """Positions after the shift, one for each rotary pair, in float64."""
        if pairs < max(len(self.bands), *(i + 1 for i in self.exact), 0):
            raise UserError(
                f"{len(self.bands)} groups and the exact pairs {self.exact} don't fit a rotation "
                f"of {pairs} pairs: give at most as many groups, and indices below {pairs}."
            )
        of_band = [shift(pos) for shift in self.bands]
        shifted = [of_band[pair * len(of_band) // pairs] for pair in range(pairs)]
        for pair in self.exact:
            shifted[pair] = SAME(pos)
        return torch.stack(shifted, -1)

    def __call__(self, pos: Tensor) -> Tensor:
        """The mean over bands, for charts that show a single position."""
        return torch.stack([shift(pos) for shift in self.bands]).mean(0)


SAME = Shift()


def at(position: float) -> Shift:
    """The shift that maps every position to this one."""
    return Shift(divide=float("inf"), add=position)
