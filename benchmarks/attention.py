"""Attention under a scheme: longitude beside plain causal SDPA and published ReRoPE, as ratios to
turning + plain causal attention.

    python -m benchmarks.attention [--tokens 4096] [--heads 8] [--dim 64] [--window 1024]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.side_by_side import compare, show
from longitude import Dims, Scheme, attention, parse

BASELINE = "transformers' turn + SDPA causal"
SAMPLED = 256


def main() -> None:
    args = options().parse_args()
    rng = torch.Generator(args.device).manual_seed(0)
    shape = (args.batch, args.heads, args.tokens, args.dim)
    q, k, v = (
        torch.randn(shape, generator=rng, device=args.device).to(getattr(torch, args.dtype))
        for _ in range(3)
    )
    w, n = args.window, args.tokens
    texts = {
        "longitude rope()": "rope()",
        f"longitude leaky ReRoPE({w}, 8)": f"rope(remap=leaky_rerope({w}, 8))",
        f"longitude ReRoPE({w})": f"rope(remap=rerope({w}))",
        f"longitude Self-Extend(8, {w})": f"rope(remap=self_extend(8, {w}))",
        f"longitude dual chunk({w}, {w // 8})": f"rope(remap=dual_chunk({w}, {w // 8}))",
        f"longitude streaming(4, {w - 4})": f"rope(remap=streaming(4, {w - 4}))",
        f"longitude window({w}, sinks=4)": f"rope() + window({w}, sinks=4)",
        "longitude stepped YaRN": f"rope(frequencies=stepped('yarn', original={w}))",
        "longitude alibi()": "alibi()",
        "longitude t5()": "t5()",
    }
    ways: dict[str, Callable[[], Any]] = {BASELINE: transformers_causal(q, k, v)}
    errors: dict[str, float] = {}
    for name, text in texts.items():
        scheme = parse(text)
        assert isinstance(scheme, Scheme)
        run = partial(longitude, scheme, q, k, v)
        ways[name], errors[name] = run, error(scheme, q, k, v, run())
    if n <= 16384:
        ways[f"published ReRoPE({w}), eager"] = partial(published, q, k, v, w)
    rows = compare(ways, BASELINE, args.rounds, errors, args.device == "cuda")
    show(f"attention {shape}, {args.dtype}, {args.device}", rows, BASELINE, args.json)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"tokens": 4096, "heads": 8, "dim": 64, "batch": 1, "window": 1024, "rounds": 7}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser


def weights_of(scheme: Scheme, q: Tensor) -> dict[str, Tensor]:
    made = scheme.init(
        Dims(q.shape[1] * q.shape[3], q.shape[1], q.shape[3]), torch.Generator().manual_seed(0)
    )
    return {name: w.to(q.device) for name, w in made.items()}


def longitude(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[2]
    with torch.no_grad():
        return attention(scheme, q, k, v, range(n), range(n), weights_of(scheme, q))


def transformers_causal(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """What a user has today: transformers' rotary function and SDPA."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply

    inv = 10000.0 ** (-torch.arange(0, q.shape[3], 2, device=q.device) / q.shape[3])
    angle = (torch.arange(q.shape[2], device=q.device)[:, None] * inv).repeat(1, 2)[None]
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    return lambda: sdpa(*apply(q, k, cos, sin), v, is_causal=True)


def published(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """ReRoPE as its repository computes it: two score matrices, a choice, a softmax."""
    from longitude.core.part import Region
    from longitude.core.region import at
    from longitude.parts import Rope
    from longitude.parts.rope import apply_rotary
    from longitude.parts.rotary_tables import cos_sin

    n, d = q.shape[2], q.shape[3]
    make = partial(cos_sin, Rope(), head_dim=d, length=1, dtype=torch.float32, device=q.device)
    near = (apply_rotary(x, *make(Region(), "q", range(n))) for x in (q, k))
    a1 = torch.matmul(*(x if i == 0 else x.transpose(-1, -2) for i, x in enumerate(near)))
    a2 = apply_rotary(q, *make(Region(q=at(window)), "q", range(n))) @ k.transpose(-1, -2)
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
    scores = torch.where(i - j < window, a1, a2) / d**0.5
    return torch.softmax(scores.masked_fill(i < j, float("-inf")), -1) @ v


def error(scheme: Scheme, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> float:
    """The relative error of some rows against float64 eager."""
    n = q.shape[2]
    rows = torch.linspace(0, n - 1, min(SAMPLED, n), device=q.device).long()
    own = {name: w.double() for name, w in weights_of(scheme, q).items()}
    few, pos = q[:, :, rows].double(), torch.arange(n, device=q.device)
    with torch.no_grad():
        want = attention(scheme, few, k.double(), v.double(), rows, pos, own, backend="eager")
    return float((out[:, :, rows].double() - want).norm() / want.norm())


if __name__ == "__main__":
    main()
