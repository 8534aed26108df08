"""One token through attention: our cache beside transformers' own cache and SDPA, as ratios.

Each way holds as many tokens as the context and is given one more a run: q, k and v of every layer,
unturned. transformers turns them, puts k and v behind the others by concatenation and calls its
SDPA function; ours is `Cache.add` and `Cache.attend`.

    python -m benchmarks.decode [--context 4096,32768] [--layers 2] [--batch 1] [--device cpu]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.side_by_side import compare, show
from longitude import Cache, Scheme, attention, parse

SCHEMES = (
    "rope()",
    "rope(remap=leaky_rerope(2048, 8))",
    "rope(remap=self_extend(8, 2048))",
    "rope(remap=dual_chunk(3072, 512))",
    "rope(remap=streaming(4, 2044))",
)
BASELINE = "transformers: cache and SDPA"
Qkv = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    args = options().parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
    torch.set_grad_enabled(False)
    for context in map(int, args.context.split(",")):
        step = tokens(args, 1)
        prompt = tokens(args, context)
        ways: dict[str, Callable[[], object]] = {BASELINE: theirs(prompt, step, context, args)}
        errors = {}
        for text in args.schemes.split(";"):
            scheme = parse(text)
            assert isinstance(scheme, Scheme)
            name = f"longitude {text}"
            ways[name] = ours(scheme, prompt, step, context, args)
            errors[name] = error(scheme, prompt, step, context)
        if args.anew:
            ways["longitude, leaky_rerope, all keys turned anew"] = anew(
                prompt, step, context, args
            )
        rows = compare(ways, BASELINE, args.rounds, errors, args.device == "cuda")
        sizes = (
            f"context {context}, {args.batch} × {args.heads} heads of {args.dim}, {args.kv_heads} "
            f"of keys, {args.layers} layers, {args.dtype}, {args.device}"
        )
        show(f"one token, {sizes}", rows, BASELINE, args.json)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "heads": 16,
        "kv-heads": 4,
        "dim": 64,
        "batch": 1,
        "layers": 2,
        "rounds": 15,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--context", default="4096,32768,131072")
    parser.add_argument("--schemes", default=";".join(SCHEMES), help="separated by ;")
    parser.add_argument("--anew", action="store_true", help="also the way that turns every key")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-cudnn", action="store_true", help="its attention switched off")
    parser.add_argument("--json", action="store_true")
    return parser


def tokens(args: argparse.Namespace, n: int) -> Qkv:
    """Random q, k and v of n tokens."""
    rng = torch.Generator(args.device).manual_seed(n)
    heads = (args.heads, args.kv_heads, args.kv_heads)
    dtype = getattr(torch, args.dtype)
    shape = (n, args.dim)
    q, k, v = (
        torch.randn(args.batch, h, *shape, generator=rng, device=args.device).to(dtype)
        for h in heads
    )
    return q, k, v


def ours(
    scheme: Scheme, prompt: Qkv, step: Qkv, context: int, args: argparse.Namespace
) -> Callable[[], Tensor]:
    caches, places = [Cache(scheme) for _ in range(args.layers)], count(context)
    for cache in caches:
        cache.add(prompt[1], prompt[2], range(context))

    def run() -> Tensor:
        at = next(places)
        q, k, v = step
        out = q
        for cache in caches:
            cache.add(k, v, range(at, at + 1))
            out = cache.attend(q, range(at, at + 1))
        return out

    return run


def theirs(prompt: Qkv, step: Qkv, context: int, args: argparse.Namespace) -> Callable[[], Tensor]:
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads}
    config = LlamaConfig(hidden_size=args.heads * args.dim, **heads)
    rotary = LlamaRotaryEmbedding(config).to(args.device)
    module: Any = SimpleNamespace(num_key_value_groups=args.heads // args.kv_heads, is_causal=True)
    cache, places = DynamicCache(), count(context)
    for layer in range(args.layers):
        cache.update(prompt[1], prompt[2], layer)

    def run() -> Tensor:
        at = torch.tensor([[next(places)]], device=args.device)
        cos, sin = rotary(step[0], at)
        out = step[0]
        for layer in range(args.layers):
            q, k = apply_rotary_pos_emb(step[0], step[1], cos, sin)
            k, v = cache.update(k, step[2], layer)
            out, _ = sdpa_attention_forward(module, q, k, v, None, scaling=args.dim**-0.5)
        return out

    return run


def anew(prompt: Qkv, step: Qkv, context: int, args: argparse.Namespace) -> Callable[[], object]:
    """What decoding costs where every key is turned at each step, as pre-RoPE keys must be."""
    scheme, (_, k, v) = parse("rope(remap=leaky_rerope(2048, 8))"), prompt
    assert isinstance(scheme, Scheme)
    places = count(context)

    def run() -> None:
        at = next(places)
        for _ in range(args.layers):
            attention(scheme, step[0], k, v, range(at, at + 1), range(at - context, at))

    return run


def error(scheme: Scheme, prompt: Qkv, step: Qkv, context: int) -> float:
    """The relative error of the first token's output against float64."""
    now = range(context, context + 1)
    q = step[0].double()
    pairs = zip(prompt[1:], step[1:], strict=True)
    k, v = (torch.cat([a.double(), b.double()], 2) for a, b in pairs)
    want = attention(scheme, q, k, v, now, range(context + 1), backend="eager")
    cache = Cache(scheme)
    cache.add(prompt[1], prompt[2], range(context))
    cache.add(step[1], step[2], now)
    return float((cache.attend(step[0], now).double() - want).norm() / want.norm())


if __name__ == "__main__":
    main()
