"""Flex's block masks, made in strips of rows: memory stays linear in the number of keys.

`create_block_mask` looks at every pair at once. Here a strip of query blocks is looked at, reduced
to which of its blocks hold any visible pair and which hold nothing else, and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longitude.attention.problem import Problem
from longitude.part import Pos, as_tensor
from longitude.region import Area, visible

BLOCK = 128
STRIP = 2**24  # pairs looked at together


def block_mask(p: Problem, areas: tuple[Area, ...]) -> Any:
    """The block mask of one pass."""
    if isinstance(p.q_pos, range) and isinstance(p.k_pos, range) and not p.hides:
        return _of_ranges(areas, p.q_pos, p.k_pos, p.q.device)
    seen = _mask_mod(p.q_rows, p.k_rows, areas, p.key_padding, p.segments)
    rows = p.q.shape[0] if p.hides else max(p.q_rows.shape[0], p.k_rows.shape[0])
    return _made(seen, rows, p.q.shape[2], p.k.shape[2], p.q.device)


@lru_cache(maxsize=64)
def _of_ranges(areas: tuple[Area, ...], q: Pos, k: Pos, device: torch.device) -> Any:
    q_pos, k_pos = (torch.atleast_2d(as_tensor(x, device)) for x in (q, k))
    return _made(_mask_mod(q_pos, k_pos, areas, None, None), 1, len(q), len(k), device)


def _mask_mod(
    q_pos: Tensor,
    k_pos: Tensor,
    areas: tuple[Area, ...],
    padding: Tensor | None,
    segments: tuple[Tensor, Tensor] | None,
) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        qi = q_pos[0][i] if q_pos.shape[0] == 1 else q_pos[b, i]
        kj = k_pos[0][j] if k_pos.shape[0] == 1 else k_pos[b, j]
        seen = visible(areas, qi, kj)
        seen = seen if padding is None else seen & ~padding[b, j]
        return seen if segments is None else seen & (segments[0][b, i] == segments[1][b, j])

    # flex counts a function's arguments, which a run-time type checker's wrapper would hide
    return lambda b, h, i, j: mask(b, h, i, j)


def _made(mask: Callable[..., Tensor], batch: int, nq: int, nk: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    rows, cols = -(-nq // BLOCK), -(-nk // BLOCK)
    step = max(1, STRIP // (batch * cols * BLOCK * BLOCK))
    strips = [
        _strip(mask, batch, a, min(a + step, rows), nq, nk, device) for a in range(0, rows, step)
    ]
    some, every = (torch.cat(parts, 1) for parts in zip(*strips, strict=True))
    partial, full = (_ordered(x) for x in (some & ~every, every))
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(nq, nk)
    )


def _strip(
    mask: Callable[..., Tensor],
    batch: int,
    top: int,
    bottom: int,
    nq: int,
    nk: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Which blocks (batch, bottom - top, cols) hold any visible pair, and which hold only such."""
    b = torch.arange(batch, device=device)[:, None, None]
    i = torch.arange(top * BLOCK, bottom * BLOCK, device=device)[None, :, None]
    j = torch.arange(-(-nk // BLOCK) * BLOCK, device=device)[None, None, :]
    seen = mask(b, torch.zeros_like(b), i.clamp(max=nq - 1), j.clamp(max=nk - 1))
    seen = (seen & (i < nq) & (j < nk)).expand(batch, i.shape[1], j.shape[2])
    seen = seen.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return seen.any(4).any(2), seen.all(4).all(2)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their columns first, as flex wants them: (b 1 rows
    [cols])."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None].contiguous(), order[:, None].contiguous()
