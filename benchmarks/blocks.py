"""Block sizes of the kernels that rotate, merge and stack, beside a copy of the same numbers.

    python -m benchmarks.blocks [--kernel rope] [--tokens 8192] [--batch 4] [--dim 128] [--json]

Runs on a GPU. `rope` sweeps the rotation of q and k; with one token, that of a decoding step.
`merge` sweeps the merging of leaky ReRoPE's three parts, `stack` the reversal of q, k and v for its
upper triangles. The fastest belong in `blocks_for` of the kernel's file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from benchmarks.side_by_side import compare, show
from longitude.ops.kernels import merge, rope
from longitude.ops.lse_merge import TileOutput
from longitude.ops.passes import Windows, windows

Ways = dict[str, Callable[[], object]]


def main() -> None:
    args = options().parse_args()
    ways = {"rope": turning, "merge": joining, "stack": stacking}[args.kernel](args)
    rows = compare(ways, "copy", args.rounds, {}, cuda=True)
    rows.sort(key=lambda row: row.ms)
    sizes = f"{args.batch}×{args.heads}×{args.tokens}×{args.dim}, {args.kv_heads} heads of keys"
    show(f"{args.kernel}, {sizes}", rows, "copy", args.json)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=["rope", "merge", "stack"], default="rope")
    parser.add_argument("--pairs", choices=["half", "adjacent"], default="half")
    for name, value in {
        "tokens": 8192, "heads": 32, "kv-heads": 8, "dim": 128, "batch": 4, "window": 1024,
        "rounds": 10,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    return parser


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def turning(args: argparse.Namespace) -> Ways:
    q, k = (drawn(args.batch, h, args.tokens, args.dim) for h in (args.heads, args.kv_heads))
    angle = drawn(1, 1, args.tokens, args.dim // 2, dtype=torch.float32)
    tables = (angle.cos(), angle.sin())
    ways: Ways = {"copy": lambda: (q.clone(), k.clone())}
    tokens = (1,) if args.tokens == 1 else (4, 8, 16, 32, 64)
    for sizes in product(tokens, (1, 2, 4, 8, 16), (1, 2, 4, 8)):
        blocks = rope.Blocks(*sizes)
        per_thread = blocks.tokens * blocks.heads * args.dim // 2 / (32 * blocks.warps)
        if 4 <= per_thread <= 64:  # pairs per thread: fewer waste it, more spill registers
            ways[str(blocks)] = lambda blocks=blocks: rope.rotate_qk(
                q, k, tables, tables, args.pairs, blocks=blocks
            )
    return ways


def joining(args: argparse.Namespace) -> Ways:
    n, w, count = args.tokens, args.window, args.tokens // args.window

    def part(tiles: int, height: int, top: int, flipped: bool) -> TileOutput:
        shape = (tiles, args.batch, args.kv_heads, height, args.heads // args.kv_heads, args.dim)
        lse = drawn(*shape[:3], shape[4], height, dtype=torch.float32)
        return TileOutput(
            drawn(*shape).transpose(3, 4), lse, [top + w * t for t in range(tiles)], flipped
        )

    parts = [
        part(count, w, 0, False),
        part(count - 1, w - 1, w, True),
        part(1, n - w, w, False),
    ]
    out = drawn(args.batch, n, args.heads, args.dim).transpose(1, 2)
    lse = drawn(args.batch, args.heads, n, dtype=torch.float32)
    # three parts are read and one output is written: as many numbers as two copies move
    ways: Ways = {"copy": lambda: (out.clone(), out.clone())}
    for sizes in product((4, 8, 16, 32, 64), (1, 2, 4, 8)):
        blocks = merge.Blocks(*sizes)
        if 8 <= blocks.rows * args.dim / (32 * blocks.warps) <= 64:
            ways[str(blocks)] = lambda blocks=blocks: merge.merge(parts, out, lse, blocks=blocks)
    return ways


def stacking(args: argparse.Namespace) -> Ways:
    w, count = args.window, args.tokens // args.window - 1
    heads = (args.heads, args.kv_heads, args.kv_heads)
    xs = [drawn(args.batch, h, args.tokens, args.dim) for h in heads]
    firsts = (w, 1, 1)  # first row of q in the second block; first column of k and v
    sources = [
        Windows(x, [first + w * t for t in range(count)], w - 1)
        for x, first in zip(xs, firsts, strict=True)
    ]
    ways: Ways = {
        "copy": lambda: [x.clone() for x in xs],
        "torch": lambda: [windows(*source).flip(3) for source in sources],
    }
    for sizes in product((8, 16, 32, 64), (1, 2, 4, 8)):
        blocks = merge.Blocks(*sizes)
        if 8 <= blocks.rows * args.dim / (32 * blocks.warps) <= 64:
            ways[str(blocks)] = lambda blocks=blocks: merge.stack(sources, True, blocks=blocks)
    return ways


if __name__ == "__main__":
    main()
