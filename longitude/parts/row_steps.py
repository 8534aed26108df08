"""Bands of rows: what a query sees changes with its own position, in steps.

A length that grows under a cache would change the rotation of what is already computed. A step that
depends on the query's own position does not: each band of rows is a region of its own, a cache
stays valid for ever, and decoding equals prefill with no length fixed in advance.
"""

from bisect import bisect_right
from typing import Any

import torch

from longitude.core.part import Pos, QueryRows, RowBands
from longitude.core.region import Area


class RowSteps(RowBands):
    """Band 0 holds the positions below `end(0)`, band b those from `end(b - 1)` up to `end(b)`."""

    def end(self, b: int) -> int:
        """The first position past band b."""
        raise NotImplementedError

    def band(self, b: int) -> Any:
        """What the queries of band b see."""
        raise NotImplementedError

    def number(self, position: int) -> int:
        """The band that holds a position."""
        most = 1
        while self.end(most) <= position:
            most *= 2
        return bisect_right(range(most + 1), position, key=self.end)

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
            rows.new_zeros(len(numbers)).scatter_reduce(0, index, rows, how, include_self=False)
            for how in ("amin", "amax")
        ]
        return tuple(torch.cat(extremes).unique().tolist())
