"""One call of a band's kernels: its tensors checked, its sizes as the kernels take them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from longitude.attention.band import Bias, Part
from longitude.attention.triton.available import require
from longitude.attention.triton.launch import shape
from longitude.fields import Mistake

LOG2E = 1 / math.log(2)
LARGEST_HEAD = 256


class Blocks(NamedTuple):
    """What one program takes: rows of queries, columns of keys at a time, by so many warps."""

    rows: int
    columns: int
    warps: int
    stages: int


class Call(NamedTuple):
    """A part whose tensors a kernel can read, and what it takes besides."""

    part: Part

    @classmethod
    def of(cls, part: Part) -> Call:
        _check(part)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in part[:3])
        bias = part.bias and Bias(part.bias.table.float().contiguous(), part.bias.first)
        return cls(Part(q, k, v, bias, part.band.within(q.shape[2], k.shape[2]), *part[5:]))

    @property
    def table(self) -> tuple[Any, ...]:
        if self.part.bias is None:  # a kernel's arguments are always there
            return (self.part.q, 0, 0, 1)
        table, first, _ = self.part.bias
        return (table, table.stride(0), first, table.shape[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        batch, heads, n, _ = self.part.q.shape
        kv, m = self.part.k.shape[1:3]
        return (batch * heads, heads, heads // kv, n, m, *self.part.band)

    @property
    def scales(self) -> tuple[float, float]:
        return (self.part.scale * LOG2E, LOG2E)

    @property
    def key(self) -> tuple[Any, ...]:
        """What follows from the tensors' shapes, and all else that a kernel is compiled for."""
        q, k, v, bias, band, _, reach, chunk = self.part
        table = bias and (bias.table.shape, bias.first)
        return (shape(q), shape(k), shape(v), table, band, chunk, reach is None)

    @property
    def tensors(self) -> list[Tensor]:
        """All that a kernel reads."""
        q, k, v, bias, _, _, reach, _ = self.part
        return [x for x in (q, k, v, bias and bias.table, reach) if x is not None]

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        """What a kernel is compiled for."""
        n, d, dv = *self.part.q.shape[2:], self.part.v.shape[-1]
        return {
            "D": d, "DV": dv, "WIDTH": _width(d), "WIDTH_V": _width(dv), "ROWS": blocks.rows,
            "COLUMNS": blocks.columns, "RUN": self.run(blocks),
            "REACH": self.part.reach is not None, "WINDOW": self.part.band.hi < n,
            "num_warps": blocks.warps, "num_stages": blocks.stages,
        }  # fmt: skip

    def run(self, blocks: Blocks) -> int:
        """Entries of the table that a tile needs; none where there is no bias."""
        return 0 if self.part.bias is None else _width(blocks.rows + blocks.columns - 1)

    @property
    def chunk(self) -> tuple[int, ...]:
        """The chunk's numbers; any others where there is none: a kernel's arguments are."""
        return tuple(self.part.chunk or (1, 0, 1, 0, 0))

    def reach(self, otherwise: Tensor) -> Tensor:
        """The reach of each head, or any tensor where there is none: a kernel's arguments are."""
        return otherwise if self.part.reach is None else self.part.reach


def laid(x: Tensor) -> tuple[Any, ...]:
    """A tensor (b h n …) for a kernel: its pointer and the strides of all but its last."""
    return (x, *x.stride()[:3])


def _width(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def _check(part: Part) -> None:
    q, k, v, bias, _, scale, *_ = part
    require(q)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or {k.dtype, v.dtype} != {
        q.dtype
    }:
        raise Mistake(
            f"the banded kernel takes q, k and v of one type, float16, bfloat16 or float32, but "
            f"got {q.dtype}, {k.dtype} and {v.dtype}: convert them."
        )
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD or scale <= 0:
        raise Mistake(
            f"the banded kernel takes heads of up to {LARGEST_HEAD} and a scale above zero, but "
            f"got {q.shape[-1]}, {v.shape[-1]} and {scale}: use another backend."
        )
    if bias and (bias.table.shape[0] != q.shape[1] or bias.table.shape[1] == 0):
        raise Mistake(
            f"a bias by distance is (heads, distances) = ({q.shape[1]}, 1 or more), but got "
            f"{tuple(bias.table.shape)}: give a row for each head."
        )
