"""Biases by distance on a GPU: the methods to run them, and the block sizes of their kernels.

    python -m benchmarks.banded [--sweep] [--grad] [--tokens 8192] [--heads 16] [--dim 128] [--json]

Without `--sweep`, T5, ALiBi and KERPLE run by each method that supports them, beside plain causal
attention by cuDNN. `--sweep` times block sizes of the kernel under a bias that never becomes flat,
or with `--window` on a band of so many distances (T5's is 128): those of forward or, with `--grad`,
those of each of the three backward kernels while the other two keep theirs. `--unbiased` leaves the
bias out. The fastest belong in `blocks_for` of the kernel's file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.side_by_side import compare, show
from longitude import Dims, Scheme, parse
from longitude.ops import banded, flex
from longitude.ops.bands import BandCall, plan_bands, reach_of
from longitude.ops.extra_dims import run_alibi
from longitude.ops.inputs import AttentionInputs, prepare
from longitude.ops.kernels import banded as kernel
from longitude.ops.kernels import banded_backward as gradients
from longitude.ops.kernels.banded import Blocks
from longitude.ops.plan import Band, CallSpec, Step
from longitude.parts.distance_bias import ByDistance

PLAIN = "plain causal, cuDNN"
Ways = dict[str, Callable[[], object]]


def weights_of(scheme: Scheme, q: Tensor) -> dict[str, Tensor]:
    dims = Dims(q.shape[1] * q.shape[3], q.shape[1], q.shape[3])
    weights = scheme.init(dims, torch.Generator().manual_seed(0))
    return {name: w.to(q.device) for name, w in weights.items()}


def main() -> None:
    args = options().parse_args()
    x = [
        torch.randn(args.batch, h, args.tokens, args.dim, device="cuda", dtype=torch.bfloat16)
        for h in (args.heads, args.kv_heads or args.heads, args.kv_heads or args.heads)
    ]
    ways, errors = sweep(x, args) if args.sweep else each_way(x, args.grad)
    ways = {PLAIN: training(x, plain) if args.grad else partial(plain, *x), **ways}
    rows = compare(ways, PLAIN, args.rounds, errors, cuda=True)
    title = (
        f"bias of the distance, {tuple(x[0].shape)}, {'backward too' if args.grad else 'forward'}"
    )
    show(title, rows[:1] + sorted(rows[1:], key=lambda row: row.ms), PLAIN, args.json)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {
        "tokens": 8192, "heads": 16, "kv-heads": 0, "dim": 128, "batch": 1, "window": 0,
        "rounds": 7,
    }  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("sweep", "grad", "unbiased", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def training(x: list[Tensor], run: Callable[..., Tensor]) -> Callable[[], object]:
    """Return a run of forward and backward."""
    leaves = [t.detach().requires_grad_() for t in x]
    seed = torch.randn(*x[0].shape[:3], x[2].shape[-1], device="cuda", dtype=x[2].dtype)
    return lambda: torch.autograd.grad(run(*leaves), leaves, seed)


def problem(text: str, *x: Tensor) -> AttentionInputs:
    (q, k, v), scheme, n = x, parse(text), x[0].shape[2]
    assert isinstance(scheme, Scheme)
    return prepare(scheme, q, k, v, range(n), range(n), weights_of(scheme, q))


def each_way(x: list[Tensor], grad: bool) -> tuple[Ways, dict[str, float]]:
    """Return runs of T5, ALiBi and KERPLE by each method that supports them, and their errors."""
    ways: Ways = {}
    errors: dict[str, float] = {}
    runs: dict[str, tuple[str, Callable[[AttentionInputs], Tensor]]] = {
        "T5, near band and cuDNN": ("t5()", by_bands),
        "T5, one band": ("t5()", one_band),
        "T5, flex": ("t5()", flex.run),
        "ALiBi, banded within reach": ("alibi()", by_bands),
        "ALiBi, banded": ("alibi()", one_band),
        "ALiBi, extra dimensions": ("alibi()", alibi_by_cudnn),
        "ALiBi, flex": ("alibi()", flex.run),
        "KERPLE, banded within reach": ("kerple_log()", by_bands),
    }
    for name, (text, run) in runs.items():
        once = partial(one_way, text, run)
        with torch.no_grad():
            errors[name] = error(problem(text, *x), once(*x))
        ways[name] = training(x, once) if grad else partial(once, *x)
    return ways, errors


def one_way(text: str, run: Callable[[AttentionInputs], Tensor], *x: Tensor) -> Tensor:
    return run(problem(text, *x))


def by_bands(p: AttentionInputs) -> Tensor:
    """Run the bands of the plan as they are."""
    return banded.run(p, plan_bands(CallSpec.of(p)))


def one_band(p: AttentionInputs) -> Tensor:
    """Run one band over all distances: without a far tile, and without skipping negligible keys."""
    plan = plan_bands(CallSpec.of(p))
    near: Step = plan.steps[-1]
    (piece,), table = near.bands, near.table
    assert table is not None
    piece = piece._replace(band=Band(piece.band.lo, p.q.shape[2]))
    near = replace(near, bands=(piece,), table=table._replace(reached=False))
    return banded.run(p, replace(plan, steps=(near,)))


def alibi_by_cudnn(p: AttentionInputs) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return run_alibi(p)


def error(p: AttentionInputs, out: Tensor) -> float:
    """Return the relative error of sampled rows against float64."""
    n, h = p.q.shape[2], p.q.shape[1]
    rows = torch.linspace(0, n - 1, 256, device=p.q.device).long()
    k, v = (t.repeat_interleave(h // t.shape[1], 1).double() for t in (p.k, p.v))
    distance = rows[:, None] - torch.arange(n, device=p.q.device)
    heads = torch.arange(h, device=p.q.device)[:, None]
    distances = torch.arange(n, device=p.q.device)[None]
    values = [t.value(heads, distances) for t in p.terms().values() if isinstance(t, ByDistance)]
    table = torch.stack(values).sum(0).double()
    scores = p.q[:, :, rows].double() @ k.mT * p.scale + table[:, distance.clamp(min=0)]
    want = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
    return float((out[:, :, rows].double() - want).norm() / want.norm())


def sweep(x: list[Tensor], args: argparse.Namespace) -> tuple[Ways, dict[str, float]]:
    """Return runs of the kernel, or of each of its three backward kernels, by block sizes."""
    grad, window = args.grad, args.window
    p = problem("kerple_log()", *x)
    table = plan_bands(CallSpec.of(p)).steps[-1].table
    assert table is not None
    bias = banded.bias_of(p, table)
    call = BandCall(x[0], x[1], x[2], bias, Band(0, window or x[0].shape[2]), p.scale)
    if args.unbiased:
        call = call._replace(bias=None)
    elif not window:
        call = call._replace(reach=reach_of(call))
    ways: Ways = {}
    if not grad:
        for sizes in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
            run = partial(kernel.banded, call, blocks=Blocks(*sizes))
            if runs(run):
                ways[str(sizes)] = run
        return ways, {}
    out, lse = kernel.banded(call)
    plan, seed = gradients.blocks_for(x[0], x[2]), torch.randn_like(out)
    for name in plan._fields:
        for sizes in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
            if name == "diagonals" and (sizes[0] != sizes[1] or args.unbiased):
                continue
            blocks = plan._replace(**{name: Blocks(*sizes)})
            run = partial(gradients.backward, call, seed, out, lse, not args.unbiased, plan=blocks)
            if runs(run):
                ways[f"{name} {sizes}"] = run
    return ways, {}


def runs(run: Callable[[], object]) -> bool:
    """Whether the GPU can run a kernel with these blocks."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as exc:  # Triton has an exception for each resource that can run out
        print(f"left out: {str(exc).splitlines()[0][:80]}")
        return False
    return True


if __name__ == "__main__":
    main()
