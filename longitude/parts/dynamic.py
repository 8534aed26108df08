"""Frequencies that depend on length: dynamic linear, NTK and YaRN, and Longitude's `stepped`.

The dynamic parts take the factor from the length of the call, max(1, l/L) (emozilla 2023; Peng et
al. 2023, section 3.3). The length is an input of `attention`, fixed for the life of a cache: if it
changed between steps, decoding would differ from prefill in every layer but the first. `stepped`
takes the factor from the query's own position instead, in bands of rows, each a region with
frequencies of its own. Site ③, inside `rope(frequencies=…)`.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import float64

from longitude.core.lengths import Lengths, Setting, combinations
from longitude.core.part import Choice, Frequencies, PerPair, Pos, QueryRows, RowBands, part
from longitude.core.region import Area
from longitude.core.validate import PositiveFloat, PositiveInt, UserError
from longitude.parts.frequencies import (
    ByParts,
    Linear,
    Ntk,
    NtkMixed,
    Unscaled,
    Yarn,
    check_bounds,
    powers,
    stretched,
)


@part("dynamic_linear", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class DynamicLinear(Frequencies):
    """Dynamic position interpolation: θ_i / max(1, l/L), l the length of the call.

    Peng et al. 2023, section 3.3 ("Dynamic Scaling"). The length is an input, fixed for the life of
    a cache.
    """

    original: PositiveInt
    by_length: ClassVar[bool] = True

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        return 1.0 / powers(dim, base, dtype) / max(1.0, length / self.original)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained)]


@part("dynamic_ntk", site="frequencies", paper="emozilla 2023; Peng et al. 2023, arXiv:2309.00071")
class DynamicNtk(Frequencies):
    """Dynamic NTK: the base grows with the length, b' = b · (f·l/L - (f - 1))^(d/(d-2)) for l > L.

    emozilla 2023; transformers' type "dynamic", whose L is `max_position_embeddings`. The length l
    is an input of the call, fixed for the life of a cache: with a length that changes under it,
    decoding would differ from prefill in every layer but the first.
    """

    original: PositiveInt
    factor: PositiveFloat = 1
    by_length: ClassVar[bool] = True

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        grown = (self.factor * max(length, self.original) / self.original) - (self.factor - 1)
        return 1.0 / powers(dim, stretched(base, grown, dim), dtype)

    @classmethod
    def candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(factor=(1, 1.25, 1.5, 2, 3, 4, self.factor))


@part("dynamic_yarn", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class DynamicYarn(Frequencies):
    """Dynamic YaRN: YaRN with the factor max(1, l/L), l the length of the call.

    Peng et al. 2023, section 3.3. The length is an input, fixed for the life of a cache.
    """

    original: PositiveInt
    fast: float = 32
    slow: PositiveFloat = 1
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        check_bounds(self, "slow", "fast", "1 and 32")

    def at(self, length: int) -> Yarn:
        """The static YaRN of this length."""
        factor = max(1.0, length / self.original)
        return Yarn(factor, original=self.original, fast=self.fast, slow=self.slow)

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        return self.at(length).inv_freq(dim, base, length, dtype)

    def gain(self, length: int) -> float:
        return self.at(length).gain(length)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls(lengths.trained)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        return combinations(fast=(4, 8, 16, 32, 64, self.fast), slow=(0.5, 1, 2, self.slow))


class RowSteps(RowBands):
    """Bands of rows: what a query sees changes with its own position, in steps.

    A length that grows under a cache would change the rotation of what is already computed. A step
    that depends on the query's own position does not: each band of rows is a region of its own, a
    cache stays valid for ever, and decoding equals prefill with no length fixed in advance. Band 0
    holds the positions below `end(0)`, band b those from `end(b - 1)` up to `end(b)`.
    """

    def end(self, b: int) -> int:
        """The first position past band b."""
        raise NotImplementedError

    def band(self, b: int) -> Any:
        """The frequencies or regions of band b."""
        raise NotImplementedError

    def number(self, position: int) -> int:
        """The number of the band that contains a position."""
        bound = 1
        while self.end(bound) <= position:
            bound *= 2
        return bisect_right(range(bound + 1), position, key=self.end)

    def bands(self, rows: QueryRows) -> tuple[tuple[Area, Any], ...]:
        if isinstance(rows, range) and rows.step == 1 and rows:
            numbers = range(self.number(rows[0]), self.number(rows[-1]) + 1)
        else:
            numbers = sorted({self.number(row) for row in rows})
        return tuple(
            (Area(top=self.end(b - 1) if b else None, bottom=self.end(b)), self.band(b))
            for b in numbers
        )

    def sample(self, pos: Pos) -> QueryRows:
        if isinstance(pos, range) or not pos.numel():
            return pos if isinstance(pos, range) and pos else range(1)
        rows = pos.flatten().floor().to(torch.int64)
        first, last = (self.number(int(row)) for row in (rows.min(), rows.max()))
        ends = torch.tensor([self.end(b) for b in range(first, last)], device=rows.device)
        numbers, index = torch.bucketize(rows, ends, right=True).unique(return_inverse=True)
        extremes = [
            rows.new_zeros(len(numbers)).scatter_reduce(0, index, rows, reduce, include_self=False)
            for reduce in ("amin", "amax")
        ]
        return tuple(torch.cat(extremes).unique().tolist())


@part("stepped", site="frequencies", paper="Longitude")
class Stepped(Frequencies, RowSteps):
    """Stepped scaling: the factor grows with the query's own position, in steps (Longitude's own).

    Queries below `original` see the model's own frequencies; those of band b, from original·(1 +
    (b-1)·step) up to original·(1 + b·step), see those of `kind` with factor 1 + b·step. Each band
    of rows is a region with its own frequencies, so a cache stays valid for ever and decoding
    equals prefill with no length fixed in advance, which dynamic scaling can't offer.
    """

    kind: Literal["yarn", "linear", "ntk", "ntk_mixed", "by_parts"]
    original: PositiveInt = field(kw_only=True)
    step: PositiveFloat = 1

    def check(self) -> None:
        if self.original * self.step < 1:
            raise UserError(
                f"stepped: a step of {self.step} × {self.original} is less than one position: "
                f"give a larger step."
            )

    def band(self, b: int) -> Frequencies:
        """The frequencies of band b."""
        factor = 1 + b * self.step
        if b == 0:
            return Unscaled()
        if self.kind in ("yarn", "by_parts"):
            return {"yarn": Yarn, "by_parts": ByParts}[self.kind](factor, original=self.original)
        return {"linear": Linear, "ntk": Ntk, "ntk_mixed": NtkMixed}[self.kind](factor)

    def end(self, b: int) -> int:
        return math.ceil(self.original * (1 + b * self.step))

    def at(self, length: int) -> Frequencies:
        """The frequencies of the last query in a text of this length."""
        return self.band(self.number(length - 1))

    def inv_freq(self, dim: int, base: float, length: int, dtype: torch.dtype = float64) -> PerPair:
        return self.at(length).inv_freq(dim, base, length, dtype)

    def gain(self, length: int) -> float:
        return self.at(length).gain(length)

    @classmethod
    def more_candidates(cls, lengths: Lengths) -> list[Choice]:
        return [cls("yarn", original=lengths.trained)]

    def grid(self, lengths: Lengths) -> Iterable[Setting]:
        kinds = ("yarn", "linear", "ntk", "ntk_mixed", "by_parts")
        return combinations(kind=kinds, step=(0.25, 0.5, 1, 2, self.step))
