"""Runs of consecutive tokens: what left padding and packing leave of a batch.

A row's real tokens, and each document packed into a row, stand at consecutive positions. Attention
over a run is attention over a range, the fast way, and what another row or document holds can't
touch it. Rows that look alike run together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longitude.part import Pos


@dataclass(frozen=True, eq=False)
class Piece:
    """Some tokens of some rows, with their positions."""

    rows: list[int]
    tokens: slice | Tensor
    pos: Pos

    def of(self, x: Tensor) -> Tensor:
        """These rows and tokens of x (b h n d)."""
        return x[self.rows][:, :, self.tokens]


def as_range(ids: Int[Tensor, "b n"]) -> range | None:
    """The positions as a range, where they are consecutive and every row's are the same."""
    n = ids.shape[1]
    same = (ids == ids[:1, :1] + torch.arange(n, device=ids.device)).all()
    first, alike = torch.stack([ids[0, 0], same.long()]).tolist()  # one look at the device
    return range(first, first + n) if alike else None


def pieces(pos: Int[Tensor, "b n"], hidden: Bool[Tensor, "b n"] | None) -> list[Piece]:
    """The runs of a batch: real tokens only, cut where a position does not grow."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    shown = torch.ones_like(pos, dtype=torch.bool) if hidden is None else ~hidden
    for row, (at, real) in enumerate(zip(pos.tolist(), shown.tolist(), strict=True)):
        tokens = [i for i, is_real in enumerate(real) if is_real]
        for run in _cut(tokens, at):
            found.setdefault((tuple(run), tuple(at[i] for i in run)), []).append(row)
    return [
        Piece(rows, _as_slice(run, pos.device), _as_pos(at, pos.device))
        for (run, at), rows in found.items()
    ]


def _cut(tokens: list[int], at: list[int]) -> list[list[int]]:
    """Tokens in runs of growing positions: where one does not grow, another document begins."""
    ends = [k for k, (i, j) in enumerate(pairwise(tokens), 1) if at[j] <= at[i]]
    bounds = [0, *ends, len(tokens)]
    return [tokens[a:b] for a, b in pairwise(bounds) if a < b]


def _consecutive(values: tuple[int, ...]) -> bool:
    return values[-1] - values[0] == len(values) - 1


def _as_slice(run: tuple[int, ...], device: torch.device) -> slice | Tensor:
    return slice(run[0], run[-1] + 1) if _consecutive(run) else torch.tensor(run, device=device)


def _as_pos(at: tuple[int, ...], device: torch.device) -> Pos:
    return range(at[0], at[-1] + 1) if _consecutive(at) else torch.tensor(at, device=device)
