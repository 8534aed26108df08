"""Rotating queries and keys together, in one launch, as fast as copying them.

y₁ = x₁ cos - x₂ sin, y₂ = x₂ cos + x₁ sin for each pair (x₁, x₂); `parts.rope.apply_rotary` is the
reference. The work is reading x and writing y, so a program takes one run of tokens for several
heads, reads its tables once for all of them, and issues every load before the first store. Programs
follow the order of x in memory. If heads lie one after the other in memory, all heads process one
chunk of tokens before the next chunk, so that its tables, of `CHUNK_BYTES`, stay in the GPU's
cache. The gradient is the same launch with the sine negated.

Tables come from `cos_sin`: float64 angles, rounded once. A kernel that computed angles in float32
would be off by a full turn at ten million positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from longitude.core.validate import UserError
from longitude.ops.kernels.launch import Shape, launch, require, shape
from longitude.parts.rope import Pairs
from longitude.parts.rotary_tables import Tables

CHUNK_BYTES = 2**22  # of tables, which stay in a GPU's cache while x streams through it


class Blocks(NamedTuple):
    """Consecutive tokens and heads per program, and warps."""

    tokens: int
    heads: int
    warps: int


Options = tuple[Pairs, bool, Blocks | None]  # pairs, inverse, blocks


# Triton specializes kernels on integers that are 1 or divisible by 16; not on these lengths
@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "chunk"])
@no_type_check
def _rope_kernel(q, q_out, q_cos, q_sin, k, k_out, k_cos, k_sin,
                 of_q, of_k, q_lanes, lanes, chunk, q_tokens, k_tokens,
                 HALF: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr,
                 INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
                 WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """Rotate one tile. A lane is HEADS heads of one sequence's queries or keys."""
    block, lane = position_of_program(lanes, chunk)
    if lane < q_lanes:
        _rope_tile(q, q_out, q_cos, q_sin, of_q, q_tokens, q, q, q, (), 0, 0, block, lane,
                   HALF, REST, ADJACENT, INVERSE, False, TOKENS, HEADS, WIDTH,
                   REST_WIDTH)  # fmt: skip
    else:
        lane -= q_lanes
        _rope_tile(k, k_out, k_cos, k_sin, of_k, k_tokens, k, k, k, (), 0, 0, block, lane,
                   HALF, REST, ADJACENT, INVERSE, False, TOKENS, HEADS, WIDTH,
                   REST_WIDTH)  # fmt: skip


@triton.jit(do_not_specialize=["q_tokens", "k_tokens", "chunk", "q_first", "q_count", "k_first",
                               "k_count"])  # fmt: skip
@no_type_check
def _rope_twice_kernel(q, q_out, q_cos, q_sin, q_far, q_far_cos, q_far_sin,
                       k, k_out, k_cos, k_sin, k_far, k_far_cos, k_far_sin,
                       of_q_far, of_k_far, q_first, k_first, q_count, k_count,
                       of_q, of_k, q_lanes, lanes, chunk, q_tokens, k_tokens,
                       HALF: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr,
                       INVERSE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
                       WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """The same; a range of the tokens is also rotated by a second pair of tables."""
    block, lane = position_of_program(lanes, chunk)
    if lane < q_lanes:
        _rope_tile(q, q_out, q_cos, q_sin, of_q, q_tokens, q_far, q_far_cos, q_far_sin,
                   of_q_far, q_first, q_count, block, lane, HALF, REST, ADJACENT, INVERSE, True,
                   TOKENS, HEADS, WIDTH, REST_WIDTH)  # fmt: skip
    else:
        lane -= q_lanes
        _rope_tile(k, k_out, k_cos, k_sin, of_k, k_tokens, k_far, k_far_cos, k_far_sin,
                   of_k_far, k_first, k_count, block, lane, HALF, REST, ADJACENT, INVERSE, True,
                   TOKENS, HEADS, WIDTH, REST_WIDTH)  # fmt: skip


@triton.jit
@no_type_check
def position_of_program(lanes, chunk):
    """The run of tokens and the lane of this program. A lane takes `chunk` runs, then the next lane
    takes the same ones, and all lanes finish a chunk before the next one begins."""
    program = tl.program_id(0)
    lane = program // chunk
    return lane // lanes * chunk + program % chunk, lane % lanes


@triton.jit
@no_type_check
def _rope_tile(x, out, cos, sin, numbers, tokens, far, far_cos, far_sin, far_numbers, first, count,
               block, lane, HALF: tl.constexpr, REST: tl.constexpr, ADJACENT: tl.constexpr,
               INVERSE: tl.constexpr, TWICE: tl.constexpr, TOKENS: tl.constexpr,
               HEADS: tl.constexpr, WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """Read, rotate and write one run of tokens of HEADS heads."""
    heads, xb, xh, xn, ob, oh, on, tb, tn = numbers
    groups = tl.cdiv(heads, HEADS)
    batch = (lane // groups).to(tl.int64)
    head = ((lane % groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    pair = tl.arange(0, WIDTH)
    c, s = _angles(cos, sin, batch * tb, token, tokens, tn, pair, HALF)
    if INVERSE:
        s = -s
    rows = (head < heads)[:, None, None] & (token < tokens)[None, :, None]
    x += batch * xb + head[:, None, None] * xh + token[None, :, None] * xn
    out += batch * ob + head[:, None, None] * oh + token[None, :, None] * on
    if TWICE:
        fb, fh, fn, ftb, ftn = far_numbers
        far_token = token - first
        far_c, far_s = _angles(far_cos, far_sin, batch * ftb, far_token, count, ftn, pair, HALF)
        far += batch * fb + head[:, None, None] * fh + far_token[None, :, None] * fn
        far_rows = rows & ((far_token >= 0) & (far_token < count))[None, :, None]
    rest = 2 * HALF + tl.arange(0, REST_WIDTH)[None, None, :]
    is_rest = rest < 2 * HALF + REST
    if REST:  # partial rotary: these dimensions pass through
        unrotated = tl.load(x + rest, mask=rows & is_rest)
    column = pair[None, None, :]
    valid = column < HALF
    if ADJACENT:
        column = tl.arange(0, 2 * WIDTH)[None, None, :]
        valid = column < 2 * HALF
        both = tl.load(x + column, mask=rows & valid).to(c.dtype)
        a, b = tl.split(tl.reshape(both, (HEADS, TOKENS, WIDTH, 2)))
    else:
        a = tl.load(x + column, mask=rows & valid).to(c.dtype)
        b = tl.load(x + HALF + column, mask=rows & valid).to(c.dtype)
    _write(out, column, a, b, c, s, rows & valid, HALF, ADJACENT)
    if REST:
        tl.store(out + rest, unrotated, mask=rows & is_rest)
    if TWICE:
        _write(far, column, a, b, far_c, far_s, far_rows & valid, HALF, ADJACENT)
        if REST:
            tl.store(far + rest, unrotated, mask=far_rows & is_rest)


@triton.jit
@no_type_check
def _angles(cos, sin, start, token, tokens, step, pair, HALF: tl.constexpr):
    """Cosines and sines of a run of tokens."""
    at = start + token[:, None] * step + pair[None, :]
    valid = ((token >= 0) & (token < tokens))[:, None] & (pair < HALF)[None, :]
    c = tl.load(cos + at, mask=valid, other=0.0, eviction_policy="evict_last")[None]
    s = tl.load(sin + at, mask=valid, other=0.0, eviction_policy="evict_last")[None]
    return c, s


@triton.jit
@no_type_check
def _write(out, column, a, b, c, s, here, HALF: tl.constexpr, ADJACENT: tl.constexpr):
    """Write the rotated pairs (a, b)."""
    if ADJACENT:
        rotated = tl.join(a * c - b * s, b * c + a * s)
        tl.store(out + column, tl.reshape(rotated, here.shape), mask=here)
    else:
        tl.store(out + column, a * c - b * s, mask=here)
        tl.store(out + HALF + column, b * c + a * s, mask=here)


def rotate_qk(
    q: Float[Tensor, "b h nq d"],
    k: Float[Tensor, "b hkv nk d"],
    q_tables: Tables,
    k_tables: Tables,
    pairs: Pairs = "half",
    *,
    inverse: bool = False,
    blocks: Blocks | None = None,
    shapes: tuple[Shape, ...] | None = None,
) -> tuple[Float[Tensor, "b h nq d"], Float[Tensor, "b hkv nk d"]]:
    """q and k rotated by their tables (b|1 1 n half), or rotated back if `inverse`, in one launch.
    `shapes` are the shapes, strides and dtypes of the tables, if already known."""
    (c, s), (kc, ks) = tables = q_tables, k_tables
    options: Options = (pairs, inverse, blocks)
    if shapes is None:
        shapes = (shape(c), shape(s))
        shapes += shapes if kc is c and ks is s else (shape(kc), shape(ks))
    rotated = _run((q, k, c, s, kc, ks), options, shapes)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return _Rotate.apply((rotated, tables, options, shapes), q, k)  # type: ignore[return-value]
    return rotated


class _Rotate(torch.autograd.Function):
    """Records autograd for a result of `_run`: the GPU rotates while the host runs autograd. The
    gradient is rotated back, and its own gradient forward again. Tables have no gradients, and cost
    the least time inside a tuple that autograd does not inspect."""

    @staticmethod
    def forward(ctx: Any, ran: tuple[Any, ...], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        rotated, *ctx.how = ran
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dq, dk), (q_tables, k_tables), (pairs, inverse, blocks), shapes = grads, *ctx.how
        kwargs: Any = {"inverse": not inverse, "blocks": blocks, "shapes": shapes}
        return None, *rotate_qk(dq, dk, q_tables, k_tables, pairs, **kwargs)


def _run(
    tensors: tuple[Tensor, ...], options: Options, tables: tuple[Shape, ...]
) -> tuple[Tensor, Tensor]:
    q, k, c, s, kc, ks = tensors
    layout = _layout((shape(q), shape(k)), tables, options, q.device)
    if not layout.fits:  # q and k are copied only if the kernel can't read them
        opts = {"memory_format": torch.contiguous_format}
        q, k = (x if x.stride(-1) == 1 else x.clone(**opts) for x in (q, k))
        copies = [x.clone(**opts) for x in (c, s, kc, ks)]
        return _run((q, k, *copies), options, tuple(map(shape, copies)))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if layout.programs:
        launch(_rope_kernel, (layout.programs, 1, 1), layout.numbers,
               (q, q_out, c, s, k, k_out, kc, ks), (layout,), lambda: layout.constants,
               pointers_first=True)  # fmt: skip
    return q_out, k_out


@dataclass(frozen=True, eq=False)
class _Layout:
    """What a launch needs besides its pointers: the same for all tensors of the same shapes."""

    numbers: tuple[Any, ...]  # for q, for k, lanes of q, all lanes, runs per chunk, tokens of both
    programs: int
    constants: dict[str, Any]
    fits: bool  # whether the kernel can read the tensors without a copy


@lru_cache(maxsize=1024)
def _layout(
    xs: tuple[Shape, ...], tables: tuple[Shape, ...], options: Options, device: torch.device
) -> _Layout:
    require(device)
    _check(xs, tables)
    pairs, inverse, blocks = options
    d, half = xs[0][0][3], tables[0][0][3]
    blocks = blocks or blocks_for([x[0] for x in xs], xs[0][2].itemsize)
    q_lanes, k_lanes = (x[0][0] * triton.cdiv(x[0][1], blocks.heads) for x in xs)
    tokens, heads_first = max(x[0][2] for x in xs) if d else 0, xs[0][1][1] > xs[0][1][2]
    table_bytes = 2 * half * tables[0][2].itemsize
    chunk, runs = chunks_of(tokens, blocks.tokens, heads_first, table_bytes)
    width, rest_width = (triton.next_power_of_2(max(n, 1)) for n in (half, d - 2 * half))
    constants = {
        "HALF": half, "REST": d - 2 * half, "ADJACENT": pairs == "adjacent", "INVERSE": inverse,
        "TOKENS": blocks.tokens, "HEADS": blocks.heads, "WIDTH": width, "REST_WIDTH": rest_width,
        "num_warps": blocks.warps,
    }  # fmt: skip
    sides = [_numbers(x, table) for x, table in zip(xs, tables[::2], strict=True)]
    alike = sides == [_numbers(x, table) for x, table in zip(xs, tables[1::2], strict=True)]
    fits = alike and all(strides[3] == 1 for _, strides, _ in xs + tables)
    lanes = q_lanes + k_lanes
    numbers = (*sides, q_lanes, lanes, chunk, xs[0][0][2], xs[1][0][2])
    return _Layout(numbers, runs * lanes, constants, fits)


def _numbers(x: Shape, table: Shape) -> tuple[int, ...]:
    """Heads; strides of batch, head and token in x and the output; of batch and token in tables."""
    (size, strides, _), (rows, steps, _) = x, table
    out = torch.empty_like(torch.empty_strided(size, strides, device="meta")).stride()
    return size[1], *strides[:3], *out[:3], steps[0] if rows[0] > 1 else 0, steps[2]


@dataclass(frozen=True, eq=False)
class Twice:
    """Rotates q and k by tables, and a range of their tokens also by a second set of tables. One
    launch reads q and k once. There is no gradient."""

    tables: tuple[Tensor, ...]  # cosines and sines of q and of k
    far: tuple[Tensor, ...]  # the second set, for a range of tokens
    firsts: tuple[int, int]  # first tokens of those ranges in q and in k
    pairs: Pairs

    @cached_property
    def shapes(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        return tuple(map(shape, self.tables)), tuple(map(shape, self.far))

    def __call__(self, q: Tensor, k: Tensor) -> list[tuple[Tensor, Tensor]]:
        (c, s, kc, ks), (fc, fs, fkc, fks) = self.tables, self.far
        xs, (all_shapes, far_shapes) = (shape(q), shape(k)), self.shapes
        layout = _layout(xs, all_shapes, (self.pairs, False, None), q.device)
        far = _far_layout(xs, far_shapes, self.firsts)
        if far is None or not layout.fits:
            (q_first, k_first), nq, nk = self.firsts, fc.shape[2], fkc.shape[2]
            cut = q[:, :, q_first : q_first + nq], k[:, :, k_first : k_first + nk]
            return [rotate_qk(q, k, (c, s), (kc, ks), self.pairs),
                    rotate_qk(*cut, (fc, fs), (fkc, fks), self.pairs)]  # fmt: skip
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        q_far, k_far = (
            torch.empty_strided(*x, dtype=q.dtype, device=q.device) for x in far.outputs
        )
        launch(_rope_twice_kernel, (layout.programs, 1, 1), (*far.numbers, *layout.numbers),
               (q, q_out, c, s, q_far, fc, fs, k, k_out, kc, ks, k_far, fkc, fks), (layout, far),
               lambda: layout.constants, pointers_first=True)  # fmt: skip
        return [(q_out, k_out), (q_far, k_far)]


class _FarLayout(NamedTuple):
    """The second outputs as sizes and strides, and the kernel's integers for them."""

    outputs: tuple[tuple[torch.Size, tuple[int, ...]], ...]
    numbers: tuple[Any, ...]  # strides for q, for k, first tokens, numbers of tokens


@lru_cache(maxsize=1024)
def _far_layout(
    xs: tuple[Shape, ...], tables: tuple[Shape, ...], firsts: tuple[int, int]
) -> _FarLayout | None:
    """What a launch needs for the second set of tables; None if the kernel can't read them."""
    outputs, numbers, counts = [], [], []
    for (size, strides, _), cos, sin, first in zip(
        xs, tables[::2], tables[1::2], firsts, strict=True
    ):
        if cos[1] != sin[1] or cos[1][3] != 1:
            return None
        count = cos[0][2]
        x = torch.empty_strided(size, strides, device="meta")[:, :, first : first + count]
        out = torch.empty_like(x).stride()
        outputs.append((x.shape, out))
        numbers.append((*out[:3], cos[1][0] if cos[0][0] > 1 else 0, cos[1][2]))
        counts.append(count)
    return _FarLayout(tuple(outputs), (*numbers, *firsts, *counts))


def blocks_for(shapes: list[torch.Size], itemsize: int) -> Blocks:
    """About 2 KiB for a single warp, two heads of each token: measured on an H200, this is as wide
    as a copy needs to be. A call with a single token takes more heads instead."""
    heads, tokens = (max(shape[axis] for shape in shapes) for axis in (1, 2))
    most_heads, most_tokens = (triton.next_power_of_2(max(size, 1)) for size in (heads, tokens))
    if tokens <= 1:
        return Blocks(1, min(8, most_heads), 2)
    width, taken = triton.next_power_of_2(shapes[0][3]), min(2, most_heads)
    return Blocks(max(1, min(2048 // (width * taken * itemsize), most_tokens)), taken, 1)


def chunks_of(tokens: int, each: int, heads_first: bool, table_bytes: int) -> tuple[int, int]:
    """The number of runs of `each` tokens per chunk, and in all chunks, for tables that take
    `table_bytes` per token."""
    runs = triton.cdiv(tokens, each)
    most = max(1, CHUNK_BYTES // max(each * table_bytes, 1)) if heads_first else 1
    chunk = triton.cdiv(runs, triton.cdiv(max(runs, 1), most)) or 1
    return chunk, triton.cdiv(runs, chunk) * chunk


def _check(xs: tuple[Shape, ...], tables: tuple[Shape, ...]) -> None:
    d, half = xs[0][0][3], tables[0][0][3]
    for x, cos, sin in zip(xs, tables[::2], tables[1::2], strict=True):
        b, _, n, head_dim = x[0]
        fits = cos[0][0] in (1, b) and tuple(cos[0][1:]) == (1, n, half) and head_dim == d
        if (cos[0], cos[2]) != (sin[0], sin[2]) or not fits or 2 * half > d:
            raise UserError(
                f"x is (b, h, n, d) where cos and sin are (b or 1, 1, n, d/2 or less), but got x "
                f"{tuple(x[0])}, cos {tuple(cos[0])}, sin {tuple(sin[0])}: slice the tables to fit."
            )
        if not (x[2].is_floating_point and cos[2].is_floating_point):
            raise UserError(f"x and its tables must be floating point, but got {x[2]}, {cos[2]}.")
