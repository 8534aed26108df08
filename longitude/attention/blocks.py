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
from longitude.part import as_tensor
from longitude.region import Area, visible

BLOCK = 128
STRIP = 2**24  # pairs looked at together


def block_mask(p: Problem, areas: tuple[Area, ...]) -> Any:
    """The block mask of one pass."""
    seen = p.mask(areas)
    # flex counts a function's arguments, which a run-time type checker's wrapper would hide
    mask_mod = lambda b, h, i, j: seen(b, i, j)  # noqa: E731
    batch = p.q.shape[0] if p.hides else max(p.q_rows.shape[0], p.k_rows.shape[0])
    if isinstance(p.q_pos, range) and isinstance(p.k_pos, range) and not p.hides:
        blocks = _of_ranges(areas, p.q_pos, p.k_pos, p.q.device)
    else:
        blocks = _blocks(seen, batch, p.q.shape[2], p.k.shape[2], p.q.device)
    return _made(blocks, mask_mod, p.q.shape[2], p.k.shape[2])


@lru_cache(maxsize=8)
def _of_ranges(
    areas: tuple[Area, ...], q: range, k: range, device: torch.device
) -> tuple[Tensor, ...]:
    """The blocks of areas over ranges, looked at once for all layers and calls."""
    q_pos, k_pos = as_tensor(q, device), as_tensor(k, device)
    return _blocks(lambda b, i, j: visible(areas, q_pos[i], k_pos[j]), 1, len(q), len(k), device)


def _blocks(
    seen: Callable[..., Tensor], batch: int, nq: int, nk: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Counts and columns of the blocks that are seen in part, and of those seen in full."""
    rows, cols = -(-nq // BLOCK), -(-nk // BLOCK)
    step = max(1, STRIP // (batch * cols * BLOCK * BLOCK))
    strips = [
        _strip(seen, batch, top, min(top + step, rows), nq, nk, device)
        for top in range(0, rows, step)
    ]
    some, every = (torch.cat(parts, 1) for parts in zip(*strips, strict=True))
    return *_ordered(some & ~every), *_ordered(every)


def _made(blocks: tuple[Tensor, ...], mask_mod: Callable[..., Tensor], nq: int, nk: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(nq, nk)
    )


def _strip(
    seen: Callable[..., Tensor],
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
    shown = seen(b, i.clamp(max=nq - 1), j.clamp(max=nk - 1))
    shown = (shown & (i < nq) & (j < nk)).expand(batch, i.shape[1], j.shape[2])
    shown = shown.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return shown.any(4).any(2), shown.all(4).all(2)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their columns first, as flex wants them: (b 1 rows
    [cols])."""
    count = chosen.sum(-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None].contiguous(), order[:, None].contiguous()
