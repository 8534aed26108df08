"""Rotating queries and keys together, in one launch, as fast as copying them.

y₁ = x₁ cos - x₂ sin, y₂ = x₂ cos + x₁ sin for each pair (x₁, x₂); `parts.rope.apply_rotary` is the
reference. The work is reading x and writing y, so a program takes one run of tokens for several
heads, reads its tables once for all of them, and has every load under way before the first store;
the programs of one run of tokens, over all heads, the full batch, queries and keys, follow each
other, so the tables come from memory once. The gradient is the same launch with the sine negated.

Tables are the ones `cos_sin` makes: float64 angles, rounded once. A kernel that made its own angles
in float32 would be off by a full turn at ten million positions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from longitude.core.validate import UserError
from longitude.ops.kernels.launch import on_device, require
from longitude.parts.rope import Pairs
from longitude.parts.rotary_tables import Tables


class Blocks(NamedTuple):
    """What one program takes: a run of tokens of some heads, by so many warps."""

    tokens: int
    heads: int
    warps: int


class Options(NamedTuple):
    """How to rotate: the pairs, the direction, where to, by which blocks."""

    pairs: Pairs
    inverse: bool = False
    inplace: bool = False
    blocks: Blocks | None = None


Tensors = tuple[Tensor, ...]


@triton.jit
@no_type_check
def _rope_kernel(q, k, q_lanes, lanes, HALF: tl.constexpr, REST: tl.constexpr,
                 ADJACENT: tl.constexpr, INVERSE: tl.constexpr, TOKENS: tl.constexpr,
                 HEADS: tl.constexpr, WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """A lane is some heads of one sequence's queries or keys; lanes run fastest."""
    program = tl.program_id(0)
    block, lane = program // lanes, program % lanes
    if lane < q_lanes:
        _rope_tile(q, block, lane, HALF, REST, ADJACENT, INVERSE, TOKENS, HEADS, WIDTH, REST_WIDTH)
    else:
        _rope_tile(
            k,
            block,
            lane - q_lanes,
            HALF,
            REST,
            ADJACENT,
            INVERSE,
            TOKENS,
            HEADS,
            WIDTH,
            REST_WIDTH,
        )


@triton.jit
@no_type_check
def _rope_tile(side, block, lane, HALF: tl.constexpr, REST: tl.constexpr,
               ADJACENT: tl.constexpr, INVERSE: tl.constexpr, TOKENS: tl.constexpr,
               HEADS: tl.constexpr, WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr):  # fmt: skip
    """One run of tokens of some heads: everything read, rotated, written."""
    x, out, cos, sin, heads, tokens, xb, xh, xn, ob, oh, on, tb, tn = side
    groups = tl.cdiv(heads, HEADS)
    batch = (lane // groups).to(tl.int64)
    head = ((lane % groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    token = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    pair = tl.arange(0, WIDTH)
    angle = batch * tb + token[:, None] * tn + pair[None, :]
    known = (token < tokens)[:, None] & (pair < HALF)[None, :]
    c = tl.load(cos + angle, mask=known, other=0.0)[None]
    s = tl.load(sin + angle, mask=known, other=0.0)[None]
    if INVERSE:
        s = -s
    rows = (head < heads)[:, None, None] & (token < tokens)[None, :, None]
    x += batch * xb + head[:, None, None] * xh + token[None, :, None] * xn
    out += batch * ob + head[:, None, None] * oh + token[None, :, None] * on
    if REST:  # partial rotary: these pass through
        rest = tl.arange(0, REST_WIDTH)[None, None, :]
        here = rows & (rest < REST)
        tl.store(out + 2 * HALF + rest, tl.load(x + 2 * HALF + rest, mask=here), mask=here)
    if ADJACENT:
        column = tl.arange(0, 2 * WIDTH)[None, None, :]
        here = rows & (column < 2 * HALF)
        both = tl.load(x + column, mask=here).to(c.dtype)
        a, b = tl.split(tl.reshape(both, (HEADS, TOKENS, WIDTH, 2)))
        rotated = tl.join(a * c - b * s, b * c + a * s)
        tl.store(out + column, tl.reshape(rotated, (HEADS, TOKENS, 2 * WIDTH)), mask=here)
    else:
        column = pair[None, None, :]
        here = rows & (column < HALF)
        a = tl.load(x + column, mask=here).to(c.dtype)
        b = tl.load(x + HALF + column, mask=here).to(c.dtype)
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
    inplace: bool = False,
    blocks: Blocks | None = None,
) -> tuple[Float[Tensor, "b h nq d"], Float[Tensor, "b hkv nk d"]]:
    """q and k rotated by their tables (b|1 1 n half), or rotated back, in one launch."""
    options = Options(pairs, inverse, inplace, blocks)
    made = _rotate((q, k), (*q_tables, *k_tables), options)
    return made[0], made[1]


def rotate(
    x: Float[Tensor, "b h n d"],
    cos: Float[Tensor, "#b 1 n half"],
    sin: Float[Tensor, "#b 1 n half"],
    pairs: Pairs = "half",
    *,
    inplace: bool = False,
    blocks: Blocks | None = None,
) -> Float[Tensor, "b h n d"]:
    """One tensor rotated: `parts.rope.apply_rotary` as a kernel."""
    return _rotate((x,), (cos, sin), Options(pairs, inplace=inplace, blocks=blocks))[0]


def _rotate(xs: Tensors, tables: Tensors, options: Options) -> Tensors:
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in xs)):
        return _run(xs, tables, options)
    if options.inplace:
        raise UserError(
            "rotating in place keeps no gradient: use inplace=False, or torch.no_grad()."
        )
    return _Rotate.apply(options, tables, *xs)  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back, and its gradient forth again."""

    @staticmethod
    def forward(ctx: Any, options: Options, tables: Tensors, *xs: Tensor) -> Tensors:
        ctx.save_for_backward(*tables)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _run(xs, tables, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tables, options = ctx.saved_tensors, ctx.options._replace(inverse=not ctx.options.inverse)
        wanted = [n for n, g in enumerate(grads) if g is not None and ctx.needs_input_grad[2 + n]]
        given: list[Tensor | None] = [None] * len(grads)
        if wanted:
            own = tuple(t for n in wanted for t in tables[2 * n : 2 * n + 2])
            made = _rotate(tuple(grads[n] for n in wanted), own, options)  # type: ignore[misc]
            for n, grad in zip(wanted, made, strict=True):  # type: ignore[arg-type]
                given[n] = grad
        return None, None, *given


def _run(xs: Tensors, tables: Tensors, options: Options) -> Tensors:
    """Whatever depends on shapes alone is settled once for each of them: a decoder's step has no
    time for it."""
    given, pointers = (*xs, *tables), 0
    shapes = ()
    for t in given:
        shapes += ((t.shape, t.stride(), t.dtype),)
        pointers |= t.data_ptr()
    launcher = _launcher(shapes, options, xs[0].device)
    if not launcher.fits:
        xs = tuple(x if x.stride(-1) == 1 else _copy(x) for x in xs)
        return _run(xs, tuple(map(_copy, tables)), options)
    outs = xs if options.inplace else tuple([torch.empty_like(x) for x in xs])
    if launcher.programs:
        launcher.launch(xs, outs, tables, aligned=pointers % 16 == 0)
    return outs


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


Shape = tuple[torch.Size, tuple[int, ...], torch.dtype]


class _Launcher:
    """What a launch needs beside its pointers, and the kernel that was compiled for it.

    Triton looks at every argument of every launch to find its kernel. Here only the pointers can
    differ from the launch before, so where all of them are aligned the kernel is known.
    """

    def __init__(self, sides: list[tuple[int, ...]], lanes: list[int], runs: int,
                 constants: tuple[Any, ...], warps: int) -> None:  # fmt: skip
        self.sides, self.programs, self.warps = sides, runs * sum(lanes), warps
        self.rest = (lanes[0], sum(lanes), *constants)
        self.fits, self.compiled = True, None

    def launch(self, xs: Tensors, outs: Tensors, tables: Tensors, *, aligned: bool) -> None:
        q = (xs[0], outs[0], tables[0], tables[1], *self.sides[0])
        k = q if len(xs) == 1 else (xs[1], outs[1], tables[2], tables[3], *self.sides[1])
        with on_device(xs[0]):
            if aligned and self.compiled is not None:
                self.compiled[self.programs, 1, 1](q, k, *self.rest)
                return
            kernel: Any = _rope_kernel[(self.programs,)]
            made = kernel(q, k, *self.rest, num_warps=self.warps, enable_fp_fusion=True)
        self.compiled = made if aligned else self.compiled


@lru_cache(maxsize=1024)
def _launcher(shapes: tuple[Shape, ...], options: Options, device: torch.device) -> _Launcher:
    count = len(shapes) // 3
    xs, tables = shapes[:count], shapes[count:]
    require(device)
    _check(xs, tables, options)
    d, half = xs[0][0][3], tables[0][0][3]
    rest = 0 if options.inplace else d - 2 * half
    blocks = options.blocks or blocks_for([x[0] for x in xs], half, xs[0][2].itemsize)
    lanes = [x[0][0] * triton.cdiv(x[0][1], blocks.heads) for x in xs]
    runs = max(triton.cdiv(x[0][2], blocks.tokens) for x in xs) if d else 0
    width, rest_width = (triton.next_power_of_2(max(size, 1)) for size in (half, rest))
    constants = (
        half,
        rest,
        options.pairs == "adjacent",
        options.inverse,
        blocks.tokens,
        blocks.heads,
    )
    sides = [_numbers(x, table, options) for x, table in zip(xs, tables[::2], strict=True)]
    launcher = _Launcher(sides, lanes, runs, (*constants, width, rest_width), blocks.warps)
    alike = sides == [
        _numbers(x, table, options) for x, table in zip(xs, tables[1::2], strict=True)
    ]
    launcher.fits = alike and all(strides[3] == 1 for _, strides, _ in shapes)
    return launcher


def _numbers(x: Shape, table: Shape, options: Options) -> tuple[int, ...]:
    """Heads, tokens, and the strides of batch, heads and tokens in x, the output and the tables."""
    (size, strides, _), (rows, steps, _) = x, table
    like = torch.empty_strided(size, strides, device="meta")
    out = strides if options.inplace else torch.empty_like(like).stride()
    return *size[1:3], *strides[:3], *out[:3], steps[0] if rows[0] > 1 else 0, steps[2]


def blocks_for(shapes: list[torch.Size], half: int, itemsize: int) -> Blocks:
    """Some 1 KiB a side of a pair for a single warp, two heads of a token: measured on an H200, as
    wide as what is moved at once needs to be; single tokens take more heads instead."""
    heads, tokens = (max(shape[axis] for shape in shapes) for axis in (1, 2))
    most_heads, most_tokens = (triton.next_power_of_2(max(size, 1)) for size in (heads, tokens))
    if tokens <= 1:
        return Blocks(1, min(8, most_heads), 2)
    width = triton.next_power_of_2(half)
    taken = min(2, most_heads)
    return Blocks(max(1, min(1024 // (width * taken * itemsize), most_tokens)), taken, 1)


def _check(xs: tuple[Shape, ...], tables: tuple[Shape, ...], options: Options) -> None:
    d, half = xs[0][0][3], tables[0][0][3]
    for x, cos, sin in zip(xs, tables[::2], tables[1::2], strict=True):
        b, _, n, own = x[0]
        fits = cos[0][0] in (1, b) and tuple(cos[0][1:]) == (1, n, half) and own == d
        if (cos[0], cos[2]) != (sin[0], sin[2]) or not fits or 2 * half > d:
            raise UserError(
                f"x is (b, h, n, d) where cos and sin are (b or 1, 1, n, d/2 or less), "
                f"got x {tuple(x[0])}, cos {tuple(cos[0])}, sin {tuple(sin[0])}: cut them to fit."
            )
        loose = any(size > 1 and step == 0 for size, step in zip(x[0], x[1], strict=True))
        if options.inplace and (x[1][3] != 1 or loose):
            raise UserError(
                f"rotating in place needs numbers of their own, side by side in each row, and got "
                f"strides {x[1]} for {tuple(x[0])}: use inplace=False."
            )
        if not (x[2].is_floating_point and cos[2].is_floating_point):
            raise UserError(
                f"only floating numbers are rotated, not {x[2]} by {cos[2]}: convert them first."
            )
