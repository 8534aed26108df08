"""Stepped scaling: the factor grows with the query's own position, in steps. Longitude's own.

Queries below `original` see the model's own frequencies; those of band b, from original·(1 +
(b-1)·step) up to original·(1 + b·step), see those of `kind` with factor 1 + b·step. Each band of
rows is a region with its own frequencies, so a cache stays valid for ever and decoding equals
prefill with no length fixed in advance: dynamic scaling without its fault.
"""

import math
from dataclasses import field
from typing import ClassVar, Literal

import torch

from longitude.part import Frequencies, Half, Mistake, part, positive
from longitude.parts.rotary.frequencies.by_parts import ByParts
from longitude.parts.rotary.frequencies.linear import Linear
from longitude.parts.rotary.frequencies.ntk import Ntk
from longitude.parts.rotary.frequencies.ntk_mixed import NtkMixed
from longitude.parts.rotary.frequencies.unscaled import Unscaled
from longitude.parts.rotary.frequencies.yarn import Yarn
from longitude.region import Area


@part("stepped", site="frequencies", paper="Longitude")
class Stepped:
    kind: Literal["yarn", "linear", "ntk", "ntk_mixed", "by_parts"]
    original: int = field(kw_only=True)
    step: float = 1
    by_length: ClassVar[bool] = False

    def check(self) -> None:
        positive(self, "original", "step")
        if self.original * self.step < 1:
            raise Mistake(
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
