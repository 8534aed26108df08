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

from longitude.core.region import Area, visible
from longitude.ops.inputs import AttentionInputs, contiguous

BLOCK = 128
STRIP = 2**24  # pairs looked at together


def block_mask(p: AttentionInputs, areas: tuple[Area, ...]) -> Any:
    """The block mask of one pass."""
    if contiguous(p.q_pos, p.k_pos) and not p.hides:
        return _of_ranges(areas, p.q_pos, p.k_pos, p.q.device)  # type: ignore[arg-type]
    seen = p.mask(areas)
    batch = p.q.shape[0] if p.hides else max(p.q_rows.shape[0], p.k_rows.shape[0])
    return _made(seen, batch, p.q.shape[2], p.k.shape[2], p.q.device)


@lru_cache(maxsize=32)
def _of_ranges(areas: tuple[Area, ...], q: range, k: range, device: torch.device) -> Any:
    """The mask of areas over ranges, made once for all layers and calls."""
    # where they begin is data, not code: another place must not be another compilation
    q0, k0 = (torch.tensor(pos.start, device=device) for pos in (q, k))
    return _made(lambda b, i, j: visible(areas, i + q0, j + k0), 1, len(q), len(k), device)


def _made(seen: Callable[..., Tensor], batch: int, nq: int, nk: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(
        *_blocks(seen, batch, nq, nk, device),
        BLOCK_SIZE=BLOCK,
        # flex counts a function's arguments, which a run-time type checker's wrapper would hide
        mask_mod=lambda b, h, i, j: seen(b, i, j),
        seq_lengths=(nq, nk),
    )


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
