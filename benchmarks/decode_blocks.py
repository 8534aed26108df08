"""Block sizes of the decoding kernel, beside flash attention over keys turned before, on a GPU.

    python -m benchmarks.decode_blocks [--tokens 32768] [--batch 1] [--scheme "rope()"] [--json]

Every way is captured in a CUDA graph: what Python launches stays out of the numbers. Columns of a
way's name are keys at once, warps, blocks ahead, and shares of the keys; those of one warp are by
the kernel of `decode_hopper` where it fits. What wins belongs into `blocks_for` and `_splits` of
`longitude/ops/kernels/decode.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from benchmarks.side_by_side import compare, show
from benchmarks.suites.timing import graphed
from longitude import Scheme, attention, parse
from longitude.ops.decode import DecodePlan, Run, TableSpec, make_decode_plan
from longitude.ops.kernels.decode import ONE_WARP, Blocks, decode
from longitude.ops.lse_merge import forward, operator_for

BASELINE = "flash attention, keys turned before"


def main() -> None:
    args = options().parse_args()
    torch.set_grad_enabled(False)
    scheme = parse(args.scheme)
    assert isinstance(scheme, Scheme)
    dtype, n = getattr(torch, args.dtype), args.tokens
    shapes = ((args.heads, args.queries), (args.kv_heads, n), (args.kv_heads, n))
    q, k, v = (
        torch.randn(args.batch, h, m, args.dim, device="cuda", dtype=dtype) for h, m in shapes
    )
    ways = {BASELINE: graphed(lambda: plain(q, k, v))}
    kept, errors, want = [], {}, exact(scheme, q, k, v)  # a graph does not keep what it reads
    several = [Blocks(*each) for each in product((32, 64, 128), (2, 4, 8), (2, 3, 4))]
    for blocks, waves in product([ONE_WARP, *several], (1, 2, 3, 4, 8)):
        programs = args.batch * args.kv_heads
        splits = max(1, min(waves * 132 // programs, n // blocks.keys))
        name = f"{' '.join(map(str, blocks))} {splits}"
        run = ours(scheme, q, k, v, blocks, splits)
        try:
            errors[name] = float((run().double() - want).norm() / want.norm())
        except Exception as why:  # too much shared memory or too many registers: no way at all
            print(f"{name}: {type(why).__name__}")
            continue
        kept.append(run)
        ways[name] = graphed(run)
    rows = compare(ways, BASELINE, args.rounds, errors, cuda=True)
    rows.sort(key=lambda row: row.ms)
    sizes = f"{args.batch}×{args.heads}×{args.dim} on {args.kv_heads}, {n} keys, {args.dtype}"
    show(f"{args.scheme}, {args.queries} × {sizes}", rows[: args.best], BASELINE, args.json)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "tokens": 32768, "heads": 32, "kv-heads": 8, "dim": 128, "batch": 1, "queries": 1,
        "rounds": 10, "best": 24,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--scheme", default="rope()")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    return parser


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads of a group as rows, so that keys are read once; what a query may not see of the
    last few keys makes no difference to the time."""
    operator = operator_for(q)
    assert operator is not None
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return forward(operator, rows, k, v, False, q.shape[3] ** -0.5).out


def ours(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, splits: int
) -> Callable[[], Tensor]:
    n, nq, d = k.shape[2], q.shape[2], q.shape[3]
    head = TableSpec(d, n, torch.float32, q.device)
    seen = make_decode_plan(scheme, head, [(Run(0, 0, n),)], [tuple(range(n - nq, n))], blocks.keys)
    assert isinstance(seen, DecodePlan)
    pairs = scheme.rotary.pairs if scheme.rotary else "half"
    return lambda: decode(q, k, v, seen, pairs, blocks=blocks, splits=splits)


def exact(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, nq = k.shape[2], q.shape[2]
    q, k, v = (x.double() for x in (q, k, v))
    return attention(scheme, q, k, v, range(n - nq, n), range(n), backend="eager", length=n)


if __name__ == "__main__":
    main()
