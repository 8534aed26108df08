"""Parts of one softmax, joined exactly by their log-sum-exps.

Two parts join as out = out₁ + σ(lse₂ - lse₁)(out₂ - out₁), lse = ln(e^lse₁ + e^lse₂). A part is
what one batch of tiles gave: windows of rows, evenly apart. A sink's logit is one more part, whose
output is nothing. On a GPU with Triton a kernel joins several parts in one launch
(`attention.triton.merge`); this is its twin, which joins them one by one, in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longitude.ops.gather_windows import evenly_apart, windows
from longitude.ops.kernels.launch import usable


class Part(NamedTuple):
    """Outputs (t b hkv g n d) and log-sum-exps (t b hkv g n) of the rows from each of `tops`.

    A flipped part has the last row of each window first.
    """

    out: Tensor
    lse: Tensor
    tops: list[int]
    flipped: bool = False


def joining(rows: tuple[int, int, int], like: Tensor) -> Joining:
    """Rows (b h n) to join parts into, with the last dimension and type of these values."""
    if usable(like):
        from longitude.ops.kernels.merge import Together  # late: it imports Triton

        return Together(rows, like)
    return OneByOne(rows, like)


class Joining(Protocol):
    """The rows of one call of attention while its parts come in."""

    def add(self, part: Part) -> None: ...

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output in the values' type, and its log-sum-exp (b h n).

        `sinks` are logits, one a head. Rows that nothing covers come out as zeros, and -inf.
        """
        ...


class OneByOne:
    """Each part is joined as it comes, in float32 at least."""

    def __init__(self, rows: tuple[int, int, int], like: Tensor) -> None:
        self.dtype, wide = like.dtype, torch.promote_types(like.dtype, torch.float32)
        self.out = torch.zeros(*rows, like.shape[-1], dtype=wide, device=like.device)
        self.lse = torch.full(rows, float("-inf"), dtype=wide, device=like.device)

    def add(self, part: Part) -> None:
        for one in apart(part):
            lerp(self.out, self.lse, one)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = self.out, self.lse
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * (self.lse - lse).exp()[..., None]
        return out.to(self.dtype), lse


def apart(part: Part) -> Iterator[Part]:
    """The part whole; where its windows share rows, or lie unevenly, each of them by itself."""
    if evenly_apart(part.tops, part.out.shape[4]):
        yield part
        return
    for n, top in enumerate(part.tops):
        yield Part(part.out[n : n + 1], part.lse[n : n + 1], [top], part.flipped)


def lerp(out: Tensor, lse: Tensor, part: Part) -> None:
    """Join one part into the running rows (b h rows d) and (b h rows), in place."""
    more, more_lse = part.out.flatten(2, 3), part.lse.flatten(2, 3).to(lse.dtype)
    if part.flipped:
        more, more_lse = more.flip(3), more_lse.flip(3)
    height = more.shape[3]
    here = windows(out, part.tops, height)
    here_lse = windows(lse[..., None], part.tops, height)[..., 0]
    weight = torch.sigmoid(more_lse - here_lse)
    weight = weight.masked_fill(more_lse == float("-inf"), 0.0)  # also where both are
    here.lerp_(more.to(out.dtype), weight[..., None])
    here_lse.copy_(torch.logaddexp(here_lse, more_lse))
