"""Turning q and k: longitude beside transformers (eager and compiled), x-transformers and
rotary-embedding-torch, as ratios to transformers' compiled function.

    python -m benchmarks.turn [--tokens 4096] [--heads 16] [--kv-heads 16] [--dim 64] [--device cpu]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.side_by_side import compare, show
from longitude.parts.rope import apply_rotary

Way = Callable[[], object]


def main() -> None:
    args = options().parse_args()
    dtype = getattr(torch, args.dtype)
    rng = torch.Generator(args.device).manual_seed(0)
    shape = (args.batch, args.tokens, args.dim)
    q, k = (
        torch.randn(shape[0], h, *shape[1:], generator=rng, device=args.device).to(dtype)
        for h in (args.heads, args.kv_heads)
    )
    inv = 10000.0 ** (
        -torch.arange(0, args.dim, 2, dtype=torch.float64, device=args.device) / args.dim
    )
    angle = torch.arange(args.tokens, device=args.device)[:, None] * inv
    cos, sin = (f.to(torch.float32)[None] for f in (angle.cos(), angle.sin()))
    for pairs, ways in (
        ("half", half(q, k, cos, sin)),
        ("adjacent", adjacent(q, k, cos, sin, inv)),
    ):
        baseline = f"transformers {pairs}, compiled"
        ways = {f"copy of q and k ({pairs})": lambda: (q.clone(), k.clone()), **ways}
        errors = {
            name: error(run(), q, angle, pairs) for name, run in ways.items() if "copy" not in name
        }
        rows = compare(ways, baseline, args.rounds, errors, args.device == "cuda")
        sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {args.dtype}, {args.device}"
        show(f"turn {pairs} pairs, {sizes}", rows, baseline, args.json)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "tokens": 4096,
        "heads": 16,
        "kv-heads": 16,
        "dim": 64,
        "batch": 1,
        "rounds": 15,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser


def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: str) -> dict[str, Way]:
    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(q, cos, sin, pairs), apply_rotary(k, cos, sin, pairs)  # type: ignore[arg-type]

    compiled, tables = torch.compile(both), (cos[:, None], sin[:, None])
    return {
        f"longitude {pairs}": lambda: both(q, k, *tables),
        f"longitude {pairs}, compiled": lambda: compiled(q, k, *tables),
    }


def half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> dict[str, Way]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply

    compiled = torch.compile(apply)
    wide = [torch.cat([x, x], -1).to(q.dtype) for x in (cos, sin)]
    return {
        "transformers half, eager": lambda: apply(q, k, *wide),
        "transformers half, compiled": lambda: compiled(q, k, *wide),
        **ours(q, k, cos, sin, "half"),
    }


def adjacent(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inv: Tensor) -> dict[str, Way]:
    from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply

    compiled = torch.compile(apply)
    wide = [x.repeat_interleave(2, -1).to(q.dtype) for x in (cos, sin)]
    found: dict[str, Way] = {
        "transformers adjacent, eager": lambda: apply(q, k, *wide),
        "transformers adjacent, compiled": lambda: compiled(q, k, *wide),
        **ours(q, k, cos, sin, "adjacent"),
    }
    angles = torch.arange(q.shape[2], device=q.device)[:, None] * inv.float()
    freqs = angles.repeat_interleave(2, -1)
    try:
        from x_transformers.x_transformers import apply_rotary_pos_emb as theirs

        found["x-transformers"] = lambda: (theirs(q, freqs[None]), theirs(k, freqs[None]))
    except ImportError:
        print("x-transformers is not installed: left out")
    try:
        from rotary_embedding_torch import apply_rotary_emb as emb

        found["rotary-embedding-torch"] = lambda: (emb(freqs, q), emb(freqs, k))
    except ImportError:
        print("rotary-embedding-torch is not installed: left out")
    return found


def error(made: object, q: Tensor, angle: Tensor, pairs: str) -> float:
    """The relative error of the turned q against float64."""
    x = q.double()
    a, b = x.chunk(2, -1) if pairs == "half" else x.unflatten(-1, (-1, 2)).unbind(-1)
    parts = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
    want = torch.cat(parts, -1) if pairs == "half" else torch.stack(parts, -1).flatten(-2)
    got = made[0]  # type: ignore[index]
    return float((got.double() - want).norm() / want.norm())


if __name__ == "__main__":
    main()
