"""Block sizes of the decoding kernel, beside flash attention over pre-rotated keys, on a GPU.

    python -m benchmarks.decode_blocks [--tokens 32768] [--batch 1] [--scheme "rope()"] [--json]

Every method is captured in a CUDA graph, so that launches from Python stay out of the numbers. The
numbers in a method's name are keys per block, warps, pipeline stages, and splits of the keys; those
of one warp run by the kernel of `decode_hopper` where it fits. The fastest belong in `blocks_for`
and `_splits` of `longitude/ops/kernels/decode.py`.
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

BASELINE = "flash attention, pre-rotated keys"


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
    kept, errors, want = [], {}, exact(scheme, q, k, v)  # a graph does not keep its inputs alive
    multi_warp = [Blocks(*each) for each in product((32, 64, 128), (2, 4, 8), (2, 3, 4))]
    for blocks, waves in product([ONE_WARP, *multi_warp], (1, 2, 3, 4, 8)):
        programs = args.batch * args.kv_heads
        splits = max(1, min(waves * 132 // programs, n // blocks.keys))
        name = f"{' '.join(map(str, blocks))} {splits}"
        run = ours(scheme, q, k, v, blocks, splits)
        try:
            errors[name] = float((run().double() - want).norm() / want.norm())
        except Exception as exc:  # these blocks need too much shared memory or too many registers
            print(f"{name}: {type(exc).__name__}")
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
    """Attention with the heads of a group as rows, so that keys are read once. No mask hides the
    last few keys from earlier queries, which makes no difference to the time."""
    operator = operator_for(q)
    assert operator is not None
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return forward(operator, rows, k, v, False, q.shape[3] ** -0.5).out


def ours(
    scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, splits: int
) -> Callable[[], Tensor]:
    n, nq, d = k.shape[2], q.shape[2], q.shape[3]
    spec = TableSpec(d, n, torch.float32, q.device)
    plan = make_decode_plan(scheme, spec, [(Run(0, 0, n),)], [tuple(range(n - nq, n))], blocks.keys)
    assert isinstance(plan, DecodePlan)
    pairs = scheme.rotary.pairs if scheme.rotary else "half"
    return lambda: decode(q, k, v, plan, pairs, blocks=blocks, splits=splits)


def exact(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, nq = k.shape[2], q.shape[2]
    q, k, v = (x.double() for x in (q, k, v))
    return attention(scheme, q, k, v, range(n - nq, n), range(n), backend="eager", length=n)


if __name__ == "__main__":
    main()
