"""Flash-decoding over pre-RoPE keys: attention of a few queries, each key rotated as it is read.
For many keys, Hopper GPUs use another kernel with one warp per program (`decode_hopper`).

The cache is read once, whatever the scheme: the keys of a block are rotated by one small table that
serves every block, and the query by the block's own angle (see `ops.decode`), so nothing is read
but keys and values. Keys are split over many programs, and a second, small launch merges their
parts of the softmax (Dao et al. 2023, "Flash-Decoding"). The queries of a group of heads that share
their keys are the rows of one product. A paged cache is read in place, through its block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longitude.core.validate import UserError
from longitude.ops.decode import FIELDS, DecodePlan, unsupported_tensors
from longitude.ops.kernels.launch import device_of, launch, require
from longitude.ops.kernels.merge import LOG2E, merge_shares_kernel
from longitude.ops.passes import dense
from longitude.ops.plan import HOPPER_HEADS
from longitude.parts.rope import Pairs

COUNTS = tl.constexpr(FIELDS)
MAX_ROWS = 64  # queries per program; a group with more takes several programs
PROGRAMS = {1: 8, 2: 4, 4: 2, 8: 2}  # programs resident on a multiprocessor, by their warps
# keys of all heads from which small programs, or single warps, are faster; queries per warp
MANY_KEYS, ONE_WARP_KEYS, ONE_WARP_QUERIES = 3 * 2**18, 2**19, 8
# integers that change as a cache grows: specializing on them would recompile mid-generation
VARYING = (
    "plan_row", "hidden_b", "table_b", "capacity", "kv_heads", "group", "tiles", "queries",
    "segments", "splits", "least", "total_rows",
)  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def decode_kernel(q, k, v, out, ints, floats, cos, sin, start_cos, start_sin, hidden, table,
            capacity, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, hidden_b, table_b, plan_row,
            scale, kv_heads, group, tiles, queries, segments, splits, least, total_rows,
            HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
            DV: tl.constexpr, DV_PAD: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
            ADJACENT: tl.constexpr, ROTATES: tl.constexpr, ALONE: tl.constexpr,
            HIDES: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, K_PAGE: tl.constexpr,
            V_PAGE: tl.constexpr, WIDE: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
    """One share of a key head's blocks: its output and, after all outputs, its log-sum-exp."""
    tile, split = tl.program_id(0), tl.program_id(1)
    pair, tile = tile // tiles, tile % tiles
    batch, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    row = tile * R + tl.arange(0, R)
    live, n = row < group * queries, row % queries
    head = kv_head * group + row // queries
    q += batch * q_b + head * q_h + n * q_n
    qa, qb, qr = _split_query(q, live, HALF, HALF_PAD, REST, REST_PAD, ADJACENT)
    k += kv_head * k_h
    v += kv_head * v_h
    if PAGE:
        table += batch * table_b
    else:
        k += batch * k_b
        v += batch * v_b
    hidden += batch * hidden_b
    ints += batch * plan_row
    floats += batch * plan_row
    segment_ints = COUNTS + 2 * queries
    begin, end = share_of(split, splits, least, ints + (segments - 1) * segment_ints)
    top = tl.full((R,), float("-inf"), tl.float32)
    norm = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, DV_PAD), tl.float32)
    for _ in range(segments):
        before, count = tl.load(ints), tl.load(ints + 1)
        first, stop = tl.maximum(begin - before, 0), tl.minimum(end - before, count)
        if first < stop:
            top, norm, acc = _segment(
                qa, qb, qr, k, v, k_n, v_n, ints, floats, cos, sin, start_cos, start_sin,
                hidden, table, capacity, n, live, scale, first, stop, top, norm, acc, HALF,
                HALF_PAD, REST, REST_PAD, DV, DV_PAD, R, N, ADJACENT, ROTATES, ALONE, HIDES, PAGE,
                GROUP, K_PAGE, V_PAGE, WIDE,
            )  # fmt: skip
        ints += segment_ints
        floats += queries * 2 * HALF
    at = split * total_rows + (batch * kv_heads * group + head) * queries + n
    safe_norm = tl.where(norm > 0, norm, 1.0)
    column = tl.arange(0, DV_PAD)
    written = live if ONCE else live & (norm > 0)
    if not ONCE:
        lse = out + total_rows.to(tl.int64) * splits * DV
        tl.store(lse + at, top + tl.log2(safe_norm), mask=live)  # of base 2
    tl.store(
        out + at[:, None] * DV + column[None, :],
        (acc / safe_norm[:, None]).to(out.dtype.element_ty),
        mask=written[:, None] & (column < DV)[None, :],
    )


@triton.jit
@no_type_check
def share_of(split, splits, least, last):
    """A share's first block and the one after its last. All sequences have shares of equal size."""
    total = tl.load(last) + tl.load(last + 1)
    share = tl.maximum(tl.cdiv(total, splits), least)
    return split * share, tl.minimum((split + 1) * share, total)


@triton.jit
@no_type_check
def _split_query(q, live, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr,
                 REST_PAD: tl.constexpr, ADJACENT: tl.constexpr):  # fmt: skip
    """The first and second element of each pair, and the dimensions that are not rotated."""
    pair, rest = tl.arange(0, HALF_PAD)[None, :], tl.arange(0, REST_PAD)[None, :]
    mask = live[:, None] & (pair < HALF)
    first, second = pair, pair + HALF
    if ADJACENT:
        first, second = 2 * pair, 2 * pair + 1
    qa = tl.load(q[:, None] + first, mask=mask, other=0.0).to(tl.float32)
    qb = tl.load(q[:, None] + second, mask=mask, other=0.0).to(tl.float32)
    rest_mask = live[:, None] & (rest < REST)
    return qa, qb, tl.load(q[:, None] + 2 * HALF + rest, mask=rest_mask, other=0.0)


@triton.jit
@no_type_check
def _segment(qa, qb, qr, k, v, k_n, v_n, ints, floats, cos, sin, start_cos, start_sin, hidden,
           table, capacity, n, live, scale, first, stop, top, norm, acc,
           HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
           DV: tl.constexpr, DV_PAD: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
           ADJACENT: tl.constexpr, ROTATES: tl.constexpr, ALONE: tl.constexpr,
           HIDES: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, K_PAGE: tl.constexpr,
           V_PAGE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Blocks first … stop-1 of a segment. The table that rotates their keys stays in registers."""
    t, pair = tl.arange(0, N), tl.arange(0, HALF_PAD)
    frame, start, offset = tl.load(ints + 2), tl.load(ints + 3), tl.load(ints + 4)
    span, chunk, per_chunk = tl.load(ints + 5), tl.load(ints + 6), tl.load(ints + 7)
    lead, wrap = tl.load(ints + 8), tl.load(ints + 9)
    least, most = tl.load(ints + 10), tl.load(ints + 11)
    low = tl.load(ints + COUNTS + 2 * n, mask=live, other=0)
    high = tl.load(ints + COUNTS + 2 * n + 1, mask=live, other=0)
    c, s = 0.0, 0.0
    if HALF:
        q_table = (floats + n * 2 * HALF)[:, None] + pair[None, :]
        qa, qb = _rotate(qa, qb, q_table, q_table + HALF, live[:, None] & (pair < HALF)[None, :])
    if ROTATES:
        valid = tl.broadcast_to((pair < HALF)[None, :], (N, HALF_PAD))
        at = (frame * N + t[:, None]) * HALF + pair[None, :]
        c, s = tl.load(cos + at, mask=valid, other=0.0), tl.load(sin + at, mask=valid, other=0.0)
    column, rest = tl.arange(0, DV_PAD), tl.arange(0, REST_PAD)
    p, end = _bounds(first + start, span, chunk, per_chunk, most)
    pages = _pages(table, p, end, N, PAGE, GROUP)
    for block in range(first + start, stop + start):
        inside = (t >= least - p) & (t < end - p)
        keys = _rows(k, k_n, pages, p + offset, t, PAGE, GROUP, K_PAGE)
        values = _rows(v, v_n, pages, p + offset, t, PAGE, GROUP, V_PAGE)
        # the next block's pages are loaded while the keys of this one are read
        next_p, next_end = _bounds(block + 1, span, chunk, per_chunk, most)
        pages = _pages(table, next_p, next_end, N, PAGE, GROUP)
        product = tl.zeros((R, N), tl.float32)
        if HALF:
            ua, ub = qa, qb
            if ROTATES:
                # the query is rotated back by the block's angle, so all blocks share one key table
                back = (frame * capacity + (block - start + lead) % wrap) * HALF + pair[None, :]
                ub, ua = _rotate(qb, qa, start_cos + back, start_sin + back, (pair < HALF)[None, :])
            a, b = _keys(keys, inside, c, s, HALF, HALF_PAD, ADJACENT, ROTATES, N)
            product = _dot(ua.to(a.dtype), tl.trans(a), product, WIDE)
            product = _dot(ub.to(b.dtype), tl.trans(b), product, WIDE)
        if REST:
            rest_mask = inside[:, None] & (rest < REST)[None, :]
            kr = tl.load(keys[:, None] + 2 * HALF + rest[None, :], mask=rest_mask, other=0.0)
            product = _dot(qr, tl.trans(kr), product, WIDE)
        visible = inside
        if HIDES:
            visible &= tl.load(hidden + p + offset + t, mask=inside, other=1) == 0
        shown = visible[None, :]
        if not ALONE:
            shown &= ((p + t)[None, :] >= low[:, None]) & ((p + t)[None, :] < high[:, None])
        product = tl.where(shown, product * scale, float("-inf"))
        v_mask = inside[:, None] & (column < DV)[None, :]
        value = tl.load(values[:, None] + column[None, :], mask=v_mask, other=0.0)
        top, norm, acc = _join(product, value, top, norm, acc, WIDE)
        p, end = next_p, next_end
    return top, norm, acc


@triton.jit
@no_type_check
def _bounds(block, span, chunk, per_chunk, most):
    """The first position of a block, and the one after its last."""
    begin = block // per_chunk * chunk
    p = begin + block % per_chunk * span
    return p, tl.minimum(tl.minimum(p + span, begin + chunk), most)


@triton.jit
@no_type_check
def _pages(table, p, end, N: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr):
    """The page of each key of a block. GROUP keys share a page, whose number is loaded once."""
    each = tl.arange(0, N // GROUP)
    if PAGE:
        index = p // PAGE + each  # few operations, which are what limits the kernel
        if GROUP == 1:
            index = (p + each) // PAGE
        each = tl.load(table + index, mask=each * GROUP < end - p, other=0)
    return tl.reshape(tl.broadcast_to(each[:, None], (N // GROUP, GROUP)), (N,))


@triton.jit
@no_type_check
def _rows(x, x_n, pages, p, t, PAGE: tl.constexpr, GROUP: tl.constexpr, X_PAGE: tl.constexpr):
    """The addresses of a block's keys or values, in their pages or one after another."""
    if PAGE:
        within = t % GROUP
        if GROUP == 1:
            within = (p + t) % PAGE
        elif GROUP < PAGE:
            within += p % PAGE
        return x + within * x_n + pages.to(tl.int64) * X_PAGE
    return x + p.to(tl.int64) * x_n + t * x_n


@triton.jit
@no_type_check
def _rotate(a, b, cos, sin, here):
    """Rotate pairs (a, b) by the angles of these tables. Called with (b, a), rotate them back."""
    c, s = tl.load(cos, mask=here, other=0.0), tl.load(sin, mask=here, other=0.0)
    return a * c - b * s, b * c + a * s


@triton.jit
@no_type_check
def _keys(keys, inside, c, s, HALF: tl.constexpr, HALF_PAD: tl.constexpr, ADJACENT: tl.constexpr,
          ROTATES: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The first and second element of each pair of a block's keys, rotated if ROTATES."""
    if ADJACENT:
        column = tl.arange(0, 2 * HALF_PAD)
        mask = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.load(keys[:, None] + column[None, :], mask=mask, other=0.0)
        a, b = tl.split(tl.reshape(both, (N, HALF_PAD, 2)))
    else:
        column = tl.arange(0, HALF_PAD)
        mask = inside[:, None] & (column < HALF)[None, :]
        a = tl.load(keys[:, None] + column[None, :], mask=mask, other=0.0)
        b = tl.load(keys[:, None] + HALF + column[None, :], mask=mask, other=0.0)
    if ROTATES:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        a = (wide_a * c - wide_b * s).to(a.dtype)
        b = (wide_b * c + wide_a * s).to(b.dtype)
    return a, b


@triton.jit
@no_type_check
def _dot(a, b, acc, WIDE: tl.constexpr):
    """Add a product to `acc`; float32 inputs are not rounded to TF32."""
    if WIDE:  # Triton's interpreter would read the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
@no_type_check
def _join(product, value, top, norm, acc, WIDE: tl.constexpr):
    """Add a block to a running softmax of base 2. Rows that have seen no key stay empty."""
    new_top = tl.maximum(top, tl.max(product, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight, rescale = tl.exp2(product - base[:, None]), tl.exp2(top - base)
    norm = norm * rescale + tl.sum(weight, 1)
    return new_top, norm, _dot(weight.to(value.dtype), value, acc * rescale[:, None], WIDE)


class Blocks(NamedTuple):
    """Keys of a block, warps of a program, and pipeline stages (blocks loaded ahead)."""

    keys: int
    warps: int
    stages: int


ONE_WARP = Blocks(16, 1, 2)  # of `decode_hopper`


def fits_one_warp(
    head: tuple[int, int, int], adjacent: bool, group: int, queries: int, dtype: torch.dtype,
    device: torch.device,
) -> bool:  # fmt: skip
    """Whether `decode_hopper` supports `head` (key size, rotated pairs, value size), for `group`
    query heads per key head with this many queries each."""
    size, half, values = head
    supported_head = size == values == 2 * half and size in HOPPER_HEADS and not adjacent
    fits_warp = queries == 1 and group <= ONE_WARP_QUERIES
    return supported_head and fits_warp and dtype != torch.float32 and device_of(device).hopper


def blocks_for(
    size: int, dtype: torch.dtype, rows: int = 1, keys: int = 0, one_warp: bool = False
) -> Blocks:
    """Blocks whose key table stays in registers, for a head size, `rows` queries that share their
    keys, and `keys` keys over all heads. `one_warp` is what `fits_one_warp` returned."""
    if one_warp and keys >= ONE_WARP_KEYS:
        return ONE_WARP
    large = size > 128 or rows > 16
    if dtype == torch.float32:
        return Blocks(16, 8, 2) if large else Blocks(32, 4, 2)
    if large:
        return Blocks(32, 8, 3)
    return Blocks(64, 4, 3) if keys < MANY_KEYS else Blocks(32, 2, 3)


def decode(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "_ hkv m d"],
    v: Float[Tensor, "_ hkv m dv"],
    plan: DecodePlan,
    pairs: Pairs = "half",
    scale: float | None = None,
    sink_logits: Float[Tensor, " h"] | None = None,
    key_padding: Bool[Tensor, "b m"] | None = None,
    *,
    block_table: Int[Tensor, "b _"] | None = None,
    out: Float[Tensor, "b h nq dv"] | None = None,
    blocks: Blocks | None = None,
    splits: int | None = None,
) -> Float[Tensor, "b h nq dv"]:
    """Attention of pre-RoPE queries over pre-RoPE keys under a plan. No gradients.

    With a block table, k and v are (blocks, hkv, block size, d). `out` must be contiguous.
    """
    if why := unsupported_tensors((q.dtype, k.dtype, v.dtype), max(q.shape[-1], v.shape[-1])):
        raise UserError(f"{why}, but got {q.dtype} and {tuple(q.shape)}: use backend='eager'.")
    if q.shape[2] != plan.queries:
        raise UserError(f"the plan is for {plan.queries} queries, not {q.shape[2]}: make another.")
    q, k, v = dense(q, k, v)
    if out is None:
        out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    hidden = plan.ints if key_padding is None else key_padding.view(torch.uint8)  # or a dummy
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    table, page = (plan.ints, 0) if block_table is None else (block_table, k.shape[2])
    shapes = (q.shape, q.stride(), k.shape[1], k.stride(), v.shape[3], v.stride())
    tables = (plan.steps[0].shape[1:], pairs == "adjacent", plan.rotates)
    paged = (page, _group(plan, page)) if page else (0, 1)
    aligned = not (k.data_ptr() | v.data_ptr()) % 16
    flags = (key_padding is not None, aligned)
    layout = _layout(shapes, q.dtype, q.device, tables, flags, paged, blocks)
    by_row = plan.ints.stride(0) if plan.ints.shape[0] > 1 else 0
    # the number of programs if all blocks belonged to sequences as long as the longest
    longest = max(plan.blocks)
    full = -(-layout.programs * sum(plan.blocks) // max(1, longest * len(plan.blocks)))
    splits = splits or _splits(max(1, full), longest, q.device, layout.constants["num_warps"])
    least = -(-longest // splits)
    once, rows, dv = splits == 1 and sink_logits is None, layout.rows, v.shape[3]
    # the outputs of all shares, then their log-sum-exps
    parts = out if once else out.new_empty(splits * rows * (dv + 1), dtype=torch.float32)
    pointers = (q, k, v, parts, plan.ints, plan.floats, *plan.steps, *plan.starts, hidden, table)
    by = LOG2E.value * (q.shape[3] ** -0.5 if scale is None else scale)
    capacity, strides = plan.starts[0].shape[1], (hidden.stride(0), table.stride(0), by_row)
    numbers = (capacity, *layout.strides, *strides, by, *layout.counts, plan.segments, splits)
    key = (layout, once, table.dtype)
    launch(layout.kernel, (layout.programs, splits, 1), (*numbers, least, rows), pointers, key,
           lambda: layout.constants | {"ONCE": once}, pointers_first=True)  # fmt: skip
    if not once:
        sinks, key = (parts, None) if sink_logits is None else (sink_logits, sink_logits.dtype)
        launch(merge_shares_kernel, (rows, 1, 1), (splits, rows, q.shape[2], q.shape[1]),
               (parts, sinks, out), (layout, key),
               lambda: {"SINKS": key is not None, "DV": dv, "DV_PAD": _pad(dv), "S": 16,
                        "num_warps": 4}, pointers_first=True)  # fmt: skip
    return out


@dataclass(frozen=True, eq=False)
class _Layout:
    """What a launch needs besides pointers: shared by calls that differ only in their key count."""

    strides: tuple[int, ...]
    counts: tuple[int, int, int, int]  # key heads, query heads per key head, tiles of rows, queries
    programs: int
    rows: int
    kernel: Any
    constants: dict[str, Any]


@lru_cache(maxsize=1024)
def _layout(
    shapes: tuple[Any, ...], dtype: torch.dtype, device: torch.device,
    tables: tuple[tuple[int, int], bool, bool], how: tuple[bool, bool], paged: tuple[int, int],
    given: Blocks | None,
) -> _Layout:  # fmt: skip
    require(device)
    (b, h, nq, d), q, hkv, k, dv, v = shapes
    (n, half), adjacent, rotates = tables
    (hides, aligned), (page, shared), group_rows = how, paged, h // hkv * nq  # rows that share keys
    strides, pages = (*q[:3], *k[:3], *v[:3]), (k[0] if page else 0, v[0] if page else 0)
    rows = min(MAX_ROWS, _pad(group_rows))
    tiles, rest = -(-group_rows // rows), d - 2 * half
    # where both sizes are possible, a plan with small blocks of keys is one for many keys
    blocks = given or blocks_for(max(d, dv), dtype, group_rows, MANY_KEYS if n <= 32 else 0)
    constants = {
        "HALF": half, "HALF_PAD": _pad(half), "REST": rest, "REST_PAD": _pad(rest), "DV": dv,
        "DV_PAD": _pad(dv), "R": rows, "N": n, "ADJACENT": adjacent, "ROTATES": rotates,
        "ALONE": nq == 1, "HIDES": hides, "PAGE": page, "GROUP": shared, "K_PAGE": pages[0],
        "V_PAGE": pages[1], "WIDE": device.type != "cuda",
        "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip
    kernel = decode_kernel
    fits = fits_one_warp((d, half, dv), adjacent, h // hkv, nq, dtype, device)
    planned = n == ONE_WARP.keys and given in (None, ONE_WARP)
    blocks_in_pages = shared == n or not page  # no block spans two pages
    by_16 = aligned and not any(stride % 16 for stride in (*strides[3:], *pages))
    if fits and planned and blocks_in_pages and by_16 and not hides:  # older Triton lacks Gluon
        kernel = import_module("longitude.ops.kernels.decode_hopper").decode_hopper_kernel
        used = {name: constants[name] for name in kernel.arg_names if name in constants}
        constants = used | {"R": ONE_WARP_QUERIES, "num_warps": ONE_WARP.warps}
    counts, programs = (hkv, h // hkv, tiles, nq), b * hkv * tiles
    return _Layout(strides, counts, programs, b * h * nq, kernel, constants)


def _group(plan: DecodePlan, page: int) -> int:
    """How many consecutive keys share a page in every block, wherever it begins."""
    keys = plan.steps[0].shape[1]
    group = min(keys, page)
    return 1 if plan.even % group or max(keys, page) % group else group


def _pad(n: int) -> int:
    """The smallest size, at least n, that a product of tiles (`tl.dot`) supports."""
    return max(16, 1 << max(n - 1, 0).bit_length())


@lru_cache(maxsize=1024)
def _splits(programs: int, blocks: int, device: torch.device, warps: int) -> int:
    """How many shares of the keys fill the device's waves; at most one share per two blocks."""
    processors = 2
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    at_once = PROGRAMS.get(warps, 2) * processors
    max_splits = max(1, min(-(-blocks // 2), -(-4 * at_once // programs)))

    def filled(splits: int) -> float:
        return programs * splits / (-(-programs * splits // at_once) * at_once)

    shares = range(1, max_splits + 1)
    return next((s for s in shares if filled(s) > 0.95), max(shares, key=filled))
