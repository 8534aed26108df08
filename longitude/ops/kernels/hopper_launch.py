"""Launches of the warp-specialised Hopper kernel: for one band, or several bands in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longitude.ops.bands import MOST_BANDS, Start
from longitude.ops.kernels.banded import LOG2E, LaunchCall, laid
from longitude.ops.kernels.banded_hopper import COLUMNS, ROWS, STAGES, kernel
from longitude.ops.kernels.launch import Shape, launch, shape
from longitude.ops.plan import HOPPER_HEADS, Band, BandPiece, Chunk

CACHED = 2**25  # bytes of keys and values: half of an H200's cache
ANY_CHUNK = (2**26, 0, 1, 0, 0)  # one chunk, which holds all tokens
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4096)
def heads_at_once(
    lanes: int, group: int, d: int, bands: tuple[tuple[int, Band, Chunk | None], ...]
) -> int:
    """How many heads run side by side, given the columns of each band: as many as read no more keys
    and values than the cache holds. Programs drift apart: with all heads at once, dual chunk read
    503 GB from memory for the 0.5 GB of far keys and values of 131,072 tokens."""
    visible = max(
        min(columns, band.hi - band.lo, (chunk.hi - chunk.lo) * chunk.size if chunk else columns)
        for columns, band, chunk in bands
    )
    max_groups, kv_heads = max(1, CACHED // max(1, 4 * visible * d)), lanes // group
    return group * max(n for n in range(1, min(max_groups, kv_heads) + 1) if kv_heads % n == 0)


def forward(call: LaunchCall, begun: Start, started: bool, outputs: tuple[Tensor, ...]) -> bool:
    """Write a band's output and log-sum-exp; with shares, only those of steady units. Return False
    if the kernel can't run the call: it needs half precision, a head size it is compiled for, and
    enough rows to occupy the whole GPU."""
    q, k, v, bias, _, _, reach, chunk = call.part
    d, units = q.shape[3], call.sizes[0] * -(-call.sizes[3] // ROWS)
    if q.dtype not in DTYPES or d not in HOPPER_HEADS or v.shape[3] != d:
        return False
    if units < _processors(q.device):
        return False
    shares, (n, m, lo, hi) = tuple((bias and bias.shares) or ()), call.sizes[3:]
    at_once = heads_at_once(call.sizes[0], call.sizes[2], d, ((m, call.part.band, chunk),))
    args = (call.table, shares, call.reach, call.sizes[:3], call.scales, at_once, n, begun.top)
    flags = {
        "BIASED": bias is not None, "SHARES": bool(shares), "STARTED": started,
        "IN_PLACE": started and outputs[0] is begun.out, "REACH": reach is not None,
        "CHUNKED": chunk is not None,
    }  # fmt: skip
    tensors = (call.table[0], call.reach, *shares)
    numbers = _unspecialized(((m, lo, hi, 0, 0, *(chunk or ANY_CHUNK)),))
    _run([(q, k)], v, numbers, outputs, args, tensors, (call.key, begun.top), flags)
    return True


def together(
    pairs: Sequence[tuple[Tensor, Tensor]], pieces: tuple[BandPiece, ...], v: Tensor, scale: float,
    n: int, out: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp of one softmax over several bands without a bias, in one launch. Each
    pair holds a band's queries, from its first row on, and the keys of its columns. `out` may
    share memory with queries: a program reads its own queries before it writes."""
    (b, h, _, d), group = pairs[0][0].shape, pairs[0][0].shape[1] // v.shape[1]
    out = v.new_empty(b, n, h, d).transpose(1, 2) if out is None else out
    lse = v.new_empty(b, h, n + -n % 16, dtype=torch.float32)
    lse = lse if lse.shape[2] == n else lse[..., :n]
    numbers, chunked, bands = _numbers(pieces)
    at_once = heads_at_once(b * h, group, d, bands)
    args = ((out, 0, 0, 1), (), out, (b * h, h, group), (scale * LOG2E, LOG2E), at_once, n, 0)
    flags = dict.fromkeys(("BIASED", "SHARES", "STARTED", "IN_PLACE", "REACH"), False)
    _run(pairs, v, numbers, (out, lse, out, lse), args, (), (n,), {**flags, "CHUNKED": chunked})
    return out, lse


Numbers = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def _numbers(pieces: tuple[BandPiece, ...]) -> tuple[Numbers, bool, tuple[Any, ...]]:
    """The kernel's integers per band, whether any has chunks, and `bands` for `heads_at_once`."""
    numbers = (
        (end - begin, *p.band, begin, p.top, *(p.chunk or ANY_CHUNK))
        for p in pieces
        for begin, end in (p.columns,)
    )
    bands = tuple((p.columns[1] - p.columns[0], p.band, p.chunk) for p in pieces)
    return _unspecialized(tuple(numbers)), any(p.chunk for p in pieces), bands


def _unspecialized(numbers: Numbers) -> Numbers:
    """Integers as the kernel reads them: 16 x + 5, which is neither 1 nor divisible by 16."""
    return tuple(tuple((x << 4) + 5 for x in row) for row in numbers)


def _run(pairs: Sequence[tuple[Tensor, Tensor]], v: Tensor, numbers: Numbers,
         outputs: tuple[Tensor, ...], given: tuple[Any, ...], read: tuple[Tensor, ...],
         key: tuple[Any, ...], how: dict[str, bool]) -> None:  # fmt: skip
    """Launch the kernel over the queries and keys of each band."""
    d, units = v.shape[3], given[3][0] * -(-given[6] // ROWS)
    descriptors = [x for q, k in pairs for x in (_descriptor(q, ROWS), _descriptor(k, COLUMNS))]
    descriptors += [*descriptors[:2] * (MOST_BANDS - len(pairs)), _descriptor(v, COLUMNS)]
    tiles, shapes = zip(*descriptors, strict=True)
    out, lse, *start = map(laid, outputs)
    args = (*tiles, out, lse, tuple(start), *given, numbers)

    def constants() -> dict[str, Any]:
        sizes = {"D": d, "ROWS": ROWS, "COLUMNS": COLUMNS, "STAGES": STAGES}
        return {**sizes, **how, "num_warps": 4}

    cache_key = (*key, *how.values(), len(numbers), shapes, *map(shape, outputs))
    grid = (min(units, _processors(v.device)), 1, 1)
    launch(kernel, grid, args, (*outputs, *read), cache_key, constants)


def _descriptor(x: Tensor, rows: int) -> tuple[TensorDescriptor, Shape]:
    """A descriptor of a tensor for TMA copies of tiles of `rows` rows, and its shape. A tensor that
    TMA can't read, with strides that are zero or not multiples of 16 bytes, is copied first. The
    descriptor's constructor is bypassed, as its checks take longer than the launch."""
    strides = x.stride()
    aligned = (x.data_ptr() | 2 * (strides[0] | strides[1] | strides[2])) % 16 == 0
    if not (aligned and all(strides) and strides[3] == 1):
        x = x.clone(memory_format=torch.contiguous_format)
        strides = x.stride()
    desc, size, dtype = TensorDescriptor.__new__(TensorDescriptor), x.shape, x.dtype
    block, layout = _tile(rows, size[3], dtype)
    vars(desc).update(base=x, shape=[*size], strides=[*strides], padding="zero", block_shape=block,
                      layout=layout)  # fmt: skip
    return desc, (size, strides, dtype)


@cache
def _tile(rows: int, d: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    block = [1, 1, rows, d]
    return block, gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])  # type: ignore[operator]
