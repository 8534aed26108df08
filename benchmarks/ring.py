"""Plain causal attention over CPU processes: our ring beside torch's and yunchang's.

    torchrun --nproc-per-node 2 -m benchmarks.ring [--tokens 4096] [--heads 8] [--dim 64]

Both peers are written for CUDA kernels; here each runs torch's CPU kernel in their place. Torch's
ring balances the work of causal attention, as our zigzag order does; yunchang's for torch's kernels
does not. Methods are interleaved, and a run ends when the last rank has finished. The baseline is
one call of SDPA over all tokens, in every process at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from longitude import attention, gather_shards, shard, shard_positions

Way = Callable[[], Tensor]
Order = Literal["contiguous", "zigzag"]
BASELINE = "one call"


def main() -> None:
    """Time the methods on all ranks and print the results on the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"tokens": 4096, "heads": 8, "dim": 64, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    shape = (1, args.heads, args.tokens, args.dim)
    inputs = [torch.randn(shape, generator=rng) for _ in range(3)]
    q, k, v = inputs
    want = sdpa(q, k, v, is_causal=True)
    ways: dict[str, Way] = {BASELINE: lambda: sdpa(q, k, v, is_causal=True)}
    errors = {BASELINE: 0.0}
    for name, make in {"longitude": ours, "torch": torchs, "yunchang": yunchangs}.items():
        try:
            ways[name], order = make(inputs)
            pos = shard_positions(args.tokens, dist.group.WORLD, order)
            out = gather_shards(ways[name](), pos, dist.group.WORLD, 2)
            errors[name] = float((out - want).abs().max())
        except (ImportError, AttributeError, RuntimeError) as error:
            ways.pop(name, None)
            if dist.get_rank() == 0:
                print(f"{name}: {error}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            times[name].append(_seconds(way))
    if dist.get_rank() == 0:
        for name, seconds in times.items():
            ratios = [t / b for t, b in zip(seconds, times[BASELINE], strict=True)]
            row = {
                "way": name, "ranks": dist.get_world_size(), "tokens": args.tokens,
                "ms": round(1e3 * median(seconds), 2), "ratio": round(median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)], "error": errors[name],
            }  # fmt: skip
            low, high = row["range"]
            line = f"{name:10} {row['ms']:9.2f} ms, {row['ratio']:.2f} of one call ({low:.2f} to "
            print(json.dumps(row) if args.json else f"{line}{high:.2f}), error {errors[name]:.0e}")
    dist.destroy_process_group()


def _seconds(way: Way) -> float:
    """Return the seconds from a common start until the last rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    way()
    dist.barrier()
    return time.perf_counter() - start


def ours(whole: list[Tensor]) -> tuple[Way, Order]:
    q, k, v = (shard(x, dist.group.WORLD, 2, "zigzag") for x in whole)
    pos = shard_positions(whole[0].shape[2], dist.group.WORLD, "zigzag")
    return lambda: attention("causal()", q, k, v, pos, pos, group=dist.group.WORLD), "zigzag"


def torchs(whole: list[Tensor]) -> tuple[Way, Order]:
    """`context_parallel` replaces SDPA's CUDA kernels alone, so its ring is called directly."""
    module = importlib.import_module(
        "torch.distributed.tensor.experimental._context_parallel._attention"
    )
    q, k, v = (shard(x, dist.group.WORLD, 2, "zigzag") for x in whole)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return lambda: module._templated_ring_attention(
        dist.group.WORLD, 2, kernel, q, k, v, is_causal=True
    )[0], "zigzag"


def yunchangs(whole: list[Tensor]) -> tuple[Way, Order]:
    kernels: Any = importlib.import_module("yunchang.kernels.attention")
    ring = importlib.import_module("yunchang.ring.ring_pytorch_attn")
    kernels._scaled_dot_product_flash_attention = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    )
    q, k, v = (shard(x, dist.group.WORLD, 2).transpose(1, 2).contiguous() for x in whole)
    run = ring.ring_pytorch_attn_func
    return lambda: run(q, k, v, causal=True, group=dist.group.WORLD).transpose(1, 2), "contiguous"


if __name__ == "__main__":
    main()
