"""Frequencies that depend on length: dynamic linear, NTK and YaRN, and Longitude's `stepped`.

The dynamic parts take the factor from the length of the call, max(1, l/L) (emozilla 2023; Peng et
al. 2023, section 3.3). The length is an input of `attention`, fixed for the life of a cache: if it
changed between steps, decoding would differ from prefill in every layer but the first. `stepped`
takes the factor from the query's own position instead, in bands of rows, each a region with
frequencies of its own. Site ③, inside `rope(frequencies=…)`.
"""

import math
from dataclasses import field
from typing import ClassVar, Literal

import torch

from longitude.core.part import Frequencies, Half, part, positive
from longitude.core.region import Area
from longitude.core.validate import UserError
from longitude.parts.frequencies import (
    ByParts,
    Linear,
    Ntk,
    NtkMixed,
    Unscaled,
    Yarn,
    powers,
    stretched,
)


@part("dynamic_linear", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class DynamicLinear:
    """Dynamic position interpolation: θ_i / max(1, l/L), l the length of the call.

    Peng et al. 2023, section 3.3 ("Dynamic Scaling"). The length is an input, fixed for the life of
    a cache.
    """

    original: int
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return 1.0 / powers(dim, base, dtype) / max(1.0, length / self.original)

    def gain(self, length: int) -> float:
        return 1.0


@part("dynamic_ntk", site="frequencies", paper="emozilla 2023; Peng et al. 2023, arXiv:2309.00071")
class DynamicNtk:
    """Dynamic NTK: the base grows with the length, b' = b · (f·l/L - (f - 1))^(d/(d-2)) for l > L.

    emozilla 2023; transformers' type "dynamic", whose L is `max_position_embeddings`. The length l
    is an input of the call, fixed for the life of a cache: with a length that changes under it,
    decoding would differ from prefill in every layer but the first.
    """

    original: int
    factor: float = 1
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original", "factor")

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        grown = (self.factor * max(length, self.original) / self.original) - (self.factor - 1)
        return 1.0 / powers(dim, stretched(base, grown, dim), dtype)

    def gain(self, length: int) -> float:
        return 1.0


@part("dynamic_yarn", site="frequencies", paper="Peng et al. 2023, arXiv:2309.00071")
class DynamicYarn:
    """Dynamic YaRN: YaRN with the factor max(1, l/L), l the length of the call.

    Peng et al. 2023, section 3.3. The length is an input, fixed for the life of a cache.
    """

    original: int
    fast: float = 32
    slow: float = 1
    by_length: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "original", "slow")
        if self.slow >= self.fast:
            raise UserError(
                f"dynamic_yarn: slow must be below fast, but got {self.slow} and {self.fast}: 1 "
                f"and 32 are usual."
            )

    def at(self, length: int) -> Yarn:
        """The static YaRN of this length."""
        factor = max(1.0, length / self.original)
        return Yarn(factor, original=self.original, fast=self.fast, slow=self.slow)

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return self.at(length).inv_freq(dim, base, length, dtype)

    def gain(self, length: int) -> float:
        return self.at(length).gain(length)


@part("stepped", site="frequencies", paper="Longitude")
class Stepped:
    """Stepped scaling: the factor grows with the query's own position, in steps. Longitude's own.

    Queries below `original` see the model's own frequencies; those of band b, from original·(1 +
    (b-1)·step) up to original·(1 + b·step), see those of `kind` with factor 1 + b·step. Each band
    of rows is a region with its own frequencies, so a cache stays valid for ever and decoding
    equals prefill with no length fixed in advance: dynamic scaling without its fault.
    """

    kind: Literal["yarn", "linear", "ntk", "ntk_mixed", "by_parts"]
    original: int = field(kw_only=True)
    step: float = 1
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "original", "step")
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
        """The first position past band b."""
        return math.ceil(self.original * (1 + b * self.step))

    def bands(self, reach: int) -> tuple[tuple[Area, Frequencies], ...]:
        """Rows and their frequencies, for queries below `reach`."""
        found, b = [(Area(bottom=self.end(0)), self.band(0))], 1
        while self.end(b - 1) < reach:
            found.append((Area(top=self.end(b - 1), bottom=self.end(b)), self.band(b)))
            b += 1
        return tuple(found)

    def at(self, length: int) -> Frequencies:
        """What the last query of this length sees."""
        b = max(0, int(((length - 1) / self.original - 1) / self.step))
        while self.end(b) < length:
            b += 1
        return self.band(b)

    def inv_freq(
        self, dim: int, base: float, length: int, dtype: torch.dtype = torch.float64
    ) -> Half:
        return self.at(length).inv_freq(dim, base, length, dtype)

    def gain(self, length: int) -> float:
        return self.at(length).gain(length)
