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
from jaxtyping import Bool, Float
from torch import Tensor

from longitude.core.validate import UserError
from longitude.ops.decode_plan import Sight
from longitude.ops.kernels.decode_kernel import decode_kernel, merge_kernel
from longitude.ops.kernels.launch import on_device, require
from longitude.parts.rope import Pairs

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


@lru_cache(maxsize=64)
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
    if why := refuses(q, k, v):
        raise UserError(f"{why}, but got {q.dtype} and {tuple(q.shape)}: use backend='eager'.")
    if q.shape[2] != sight.queries:
        raise UserError(
            f"{q.shape[2]} queries came with places for {sight.queries}: give one each."
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    seen = (sight.frames.steps[0].shape[1:], pairs == "adjacent", sight.turns)
    shapes = (q.shape, q.stride(), k.shape[1], k.stride(), v.shape[3], v.stride())
    plan = _plan(shapes, q.dtype, q.device, seen, key_padding is not None, blocks)
    by = LOG2E * (q.shape[3] ** -0.5 if scale is None else scale)
    splits = splits or _splits(plan.programs, sight.blocks, q.device)
    with on_device(q):
        plan.launch((q, k, v, out), sight, by, splits, sink_logits, key_padding)
    return out


class _Plan:
    """What launches need beside their pointers, and the kernels that were compiled for them.

    Triton looks at every argument of every launch to find its kernel. Here only pointers can differ
    from the launch before, so where all of them are aligned the kernel is known.
    """

    def __init__(
        self, strides: tuple[int, ...], counts: tuple[int, ...], constants: tuple[Any, ...],
        blocks: Blocks,
    ) -> None:  # fmt: skip
        self.strides, self.counts, self.constants = strides, counts, constants
        *_, self.programs, self.total, self.heads = counts
        self.options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
        self.made: dict[tuple[Any, bool], Any] = {}

    def launch(self, given: tuple[Tensor, ...], sight: Sight, scale: float, splits: int,
               sinks: Tensor | None, padding: Tensor | None) -> None:  # fmt: skip
        q, k, v, out = given
        once, dv = splits == 1 and sinks is None, out.shape[3]
        lse = out.new_empty(splits, self.total, dtype=torch.float32)
        parts = out if once else lse.new_empty(splits, self.total, dv)
        ints, starts = sight.ints, sight.frames.starts
        hidden = ints if padding is None else padding.view(torch.uint8)  # ints stand for nothing
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        row = ints.stride(0) if ints.shape[0] > 1 else 0
        pointers = (q, k, v, parts, lse, ints, sight.floats, *sight.frames.steps, *starts, hidden)
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr() | hidden.data_ptr()) % 16 == 0
        tiles, nq, group = self.counts[:3]
        self._run(_shares, once, aligned, (self.programs, splits, 1), (
            *pointers, starts[0].shape[1], *self.strides, hidden.stride(0), row, scale,
            self.heads // group, group, tiles, nq, sight.pieces, splits, self.total,
            *self.constants,
        ), self.options)  # fmt: skip
        if not once:
            sizes = (splits, self.total, nq, self.heads)
            constants = (sinks is not None, dv, _pad(dv), 16)
            args = (parts, lse, sinks, out, *sizes, *constants)
            # a sink is the caller's: it may lie anywhere
            self._run(_merged, once, sinks is None, (self.total, 1, 1), args, {"num_warps": 4})

    def _run(
        self, kernel: Any, once: bool, aligned: bool, grid: tuple[int, int, int],
        args: tuple[Any, ...], options: dict[str, int],
    ) -> None:  # fmt: skip
        made = self.made.get((kernel, once)) if aligned else None
        if made is not None:
            made[grid](*args)
            return
        made = kernel[grid](*args, **options, enable_fp_fusion=True)
        if aligned:
            self.made[kernel, once] = made


@lru_cache(maxsize=1024)
def _plan(
    shapes: tuple[Any, ...], dtype: torch.dtype, device: torch.device,
    seen: tuple[tuple[int, int], bool, bool], hides: bool, blocks: Blocks | None,
) -> _Plan:  # fmt: skip
    """Settled once for every shape, but for the number of keys, which may be any."""
    require(device)
    (b, h, nq, d), q, hkv, k, dv, v = shapes
    (n, half), adjacent, turns = seen
    each = h // hkv * nq  # rows that share their keys
    rows = min(ROWS, _pad(each))
    tiles = -(-each // rows)
    counts = (tiles, nq, h // hkv, b * hkv * tiles, b * h * nq, h)
    rest = d - 2 * half
    constants = (
        half, _pad(half), rest, _pad(rest), dv, _pad(dv), rows, n, adjacent, turns, nq == 1, hides,
        device.type != "cuda",
    )  # fmt: skip
    blocks = blocks or blocks_for(max(d, dv), dtype, each)
    return _Plan((*q[:3], *k[:3], *v[:3]), counts, constants, blocks)


def _pad(n: int) -> int:
    """The sizes that a product of matrices takes."""
    return max(16, 1 << max(n - 1, 0).bit_length())


@lru_cache(maxsize=1024)
def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """Shares of the keys such that programs fill the device's waves; a share has some blocks."""
    at_once = PROGRAMS * (_processors(device) if device.type == "cuda" else 2)
    most = max(1, min(-(-blocks // 2), -(-4 * at_once // programs)))

    def filled(splits: int) -> float:
        return programs * splits / (-(-programs * splits // at_once) * at_once)

    return next(
        (s for s in range(1, most + 1) if filled(s) > 0.95), max(range(1, most + 1), key=filled)
    )


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
