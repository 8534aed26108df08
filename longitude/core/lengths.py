"""The numbers that extension methods derive from a model's trained length and a target length.

Parts that extend a context receive a `Lengths` in their optional methods (`core/part.py`):
`candidates` chooses parameters by the paper's own rule, `grid` lists the values that
`extend --search` may try. Both follow published limits: windows from 1/8 to 3/4 of the trained
length (Su, kexue.fm 9708, 9731), factors from the ratio of the lengths up to twice that, because
the last stretch before a method's limit is its worst (kexue.fm 9948).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

WINDOW_SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the trained length
NEARBY = (0.8, 0.9, 1.1, 1.25)  # multiples of the current value
FACTOR_SHARES = (1, 1.25, 1.5, 1.75, 2)  # multiples of the ratio of the lengths
Setting = dict[str, Any]  # values for some of a part's parameters


@dataclass(frozen=True)
class Lengths:
    """The length a model was trained on, and the length it is to be run at."""

    trained: int
    target: int

    @property
    def ratio(self) -> float:
        return self.target / self.trained

    def factor(self, times: float = 1) -> float:
        """A multiple of the ratio with at most two decimals, rounded up."""
        return float(f"{math.ceil(round(times * self.ratio * 100, 6)) / 100:g}")

    def share(self, denominator: int) -> int:
        """1/denominator of the trained length, at least 1."""
        return max(1, self.trained // denominator)

    def windows(self, current: int) -> list[int]:
        """Windows inside the trained length, some of them near the current one."""
        shares = [round(share * self.trained) for share in WINDOW_SHARES]
        near = [round(current * step) for step in NEARBY]
        return distinct(w for w in (*shares, current, *near) if 0 < w < self.trained)

    def factors(self, current: float) -> list[float]:
        """Factors from the ratio of the lengths up to twice that, some near the current one."""
        near = [current * step for step in NEARBY]
        values = (*(self.ratio * by for by in FACTOR_SHARES), current, *near)
        low, high = self.ratio - 1e-9, 2 * self.ratio + 1e-9
        return distinct(rounded(v) for v in values if low <= v <= high)


def combinations(**fields: Iterable[Any]) -> Iterator[Setting]:
    """Yield every combination of the fields' values, without repetitions."""
    values = [distinct(each) for each in fields.values()]
    return (dict(zip(fields, chosen, strict=True)) for chosen in product(*values))


def distinct(values: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in order."""
    return list(dict.fromkeys(values))


def rounded(value: float) -> float:
    """Round to at most four decimals, so that a scheme's text stays short."""
    return round(value, 4)
