"""Attention of a few queries over a long cache of unturned keys, each turned as it is read.

A cache is read once, whatever the scheme: the keys of a block turn by one small table that serves
every block, the query by the block's own angle (see `attention/sight.py`), so nothing is read but
keys and values. The keys are split over many programs and their parts of the softmax merged by a
second small launch (flash-decoding: Dao et al. 2023); the queries of a group of heads that share
their keys are the rows of one product. `sight.looked_at` is the twin.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.attention.sight import Sight
from longitude.attention.triton.available import interpreted, on_device, require
from longitude.attention.triton.decode_kernel import decode_kernel, merge_kernel
from longitude.fields import Mistake
from longitude.parts.rotary.turn import Pairs

LOG2E = math.log2(math.e)
ROWS = 64  # queries of one program at most; more of a group go to further programs
PROGRAMS = 2  # that a multiprocessor holds at once
_shares: Any = decode_kernel
_merged: Any = merge_kernel


class Blocks(NamedTuple):
    """How many keys a program takes at once, by so many warps, so many blocks ahead."""

    keys: int
    warps: int
    stages: int


def blocks_for(size: int, dtype: torch.dtype, rows: int = 1) -> Blocks:
    """Keys at once such that a block's table stays in registers, for heads of a size and a group of
    so many queries."""
    large = size > 128 or rows > 16
    if dtype == torch.float32:
        return Blocks(16, 8, 2) if large else Blocks(32, 4, 2)
    return Blocks(32, 8, 3) if large else Blocks(64, 4, 3)


def refuses(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernel can't run over these, or None."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the decoding kernel has no way for {q.dtype}"
    if not q.dtype == k.dtype == v.dtype:
        return "the decoding kernel wants queries, keys and values of one type"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return "the decoding kernel takes heads of up to 256"
    return None


@torch.no_grad()
def decode(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv m d"],
    v: Float[Tensor, "b hkv m dv"],
    sight: Sight,
    pairs: Pairs = "half",
    scale: float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    key_padding: Bool[Tensor, "b m"] | None = None,
    *,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Attention of unturned queries over unturned keys, as `sight` tells. No gradients."""
    require(q)
    if why := refuses(q, k, v):
        raise Mistake(f"{why}, but got {q.dtype} and {tuple(q.shape)}: use backend='eager'.")
    if q.shape[2] != sight.queries:
        raise Mistake(f"{q.shape[2]} queries came with places for {sight.queries}: give one each.")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if key_padding is not None:
        key_padding = key_padding.contiguous()
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    if out.numel():
        with on_device(q):
            _launch(q, k, v, out, sight, pairs, scale, (sink_logits, key_padding), (blocks, splits))
    return out


def _launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, sight: Sight, pairs: Pairs,
            scale: float | None, beside: tuple[Tensor | None, Tensor | None],
            asked: tuple[Blocks | None, int | None]) -> None:  # fmt: skip
    (b, h, nq, d), hkv, dv, (sinks, padding) = q.shape, k.shape[1], v.shape[-1], beside
    (_, n, half), starts = sight.frames.steps[0].shape, sight.frames.starts
    blocks = asked[0] or blocks_for(max(d, dv), q.dtype, h // hkv * nq)
    rows = min(ROWS, _pad(h // hkv * nq))
    tiles = -(-(h // hkv * nq) // rows)
    programs, total = b * hkv * tiles, b * h * nq
    splits = asked[1] or _splits(programs, sight.blocks, q.device)
    once = splits == 1 and sinks is None
    parts = out if once else torch.empty(splits, total, dv, dtype=torch.float32, device=q.device)
    lse = torch.empty(splits, total, dtype=torch.float32, device=q.device)
    hidden = sight.ints if padding is None else padding.view(torch.uint8)  # or nothing that is read
    by = LOG2E * (d**-0.5 if scale is None else scale)
    plan_row = sight.ints.stride(0) if sight.ints.shape[0] > 1 else 0
    _shares[programs, splits](
        q, k, v, parts, lse, sight.ints, sight.floats, *sight.frames.steps,
        *starts, hidden, starts[0].shape[1],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], hidden.stride(0), plan_row, by,
        hkv, h // hkv, tiles, nq, sight.pieces, splits, total,
        HALF=half, HALF_PAD=_pad(half), REST=d - 2 * half, REST_PAD=_pad(d - 2 * half),
        DV=dv, DV_PAD=_pad(dv), R=rows, N=n, ADJACENT=pairs == "adjacent", TURNS=sight.turns,
        ALONE=nq == 1, HIDES=padding is not None, WIDE=interpreted(),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if not once:
        _merged[total,](
            parts, lse, sinks, out, splits, total, nq, h, SINKS=sinks is not None,
            DV=dv, DV_PAD=_pad(dv), S=16, num_warps=4,
        )  # fmt: skip


def _pad(n: int) -> int:
    """The sizes that a product of matrices takes."""
    return max(16, triton.next_power_of_2(n))


@lru_cache(maxsize=1024)
def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """Shares of the keys such that programs fill the device's waves; a share has some blocks."""
    at_once = PROGRAMS * (_processors(device) if device.type == "cuda" else 2)
    most = max(1, min(-(-blocks // 2), -(-2 * at_once // programs)))

    def filled(splits: int) -> float:
        return programs * splits / (-(-programs * splits // at_once) * at_once)

    return next(
        (s for s in range(1, most + 1) if filled(s) > 0.95), max(range(1, most + 1), key=filled)
    )


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
