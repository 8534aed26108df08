"""A patched Llama beside the same model untouched: time a token of decoding, time of prefill.

    python -m benchmarks.hf [--layers 4] [--context 4096,32768] [--prefill 8192] [--device cuda]

The shape is SmolLM2-135M's, the weights are random. Caches are filled with random keys rather than
by a prefill, so that a long context costs no more to set up than it takes to write down.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.side_by_side import compare, show
from benchmarks.suites.model import SHAPE, fill
from longitude.hf.patch import apply

STOCK = "transformers, its own cache"
SCHEMES = {
    "frequencies alone: yarn": "rope(frequencies=yarn(4, original=8192))",
    "leaky_rerope(4096, 8)": "rope(remap=leaky_rerope(4096, 8))",
    "rerope(4096)": "rope(remap=rerope(4096))",
    "self_extend(16, 1024)": "rope(remap=self_extend(16, 1024))",
    "logn: attention alone": "logn(8192)",
}


def main() -> None:
    args = options().parse_args()
    torch.backends.cuda.enable_cudnn_sdp(not args.no_cudnn)
    models = {STOCK: build(args)} | {name: build(args, s) for name, s in SCHEMES.items()}
    for context in args.context:
        ways = {name: decoding(model, context, args) for name, model in models.items()}
        rows = compare(ways, STOCK, args.rounds, {}, args.device == "cuda")
        what = f"{args.tokens} tokens after {context:,}, {args.layers} layers, {args.dtype}"
        show(f"decoding on {args.device}: {what}", rows, STOCK, args.json)
    for n in args.prefill:
        ways = {name: prefill(model, n) for name, model in models.items()}
        rows = compare(ways, STOCK, args.rounds, {}, args.device == "cuda")
        show(f"prefill of {n:,} on {args.device}: {args.layers} layers", rows, STOCK, args.json)


def build(args: argparse.Namespace, scheme: str | None = None) -> Any:
    """The model, with a scheme of its own for good: a cache can't change hands."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=args.layers)
    model = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()
    if scheme is not None:
        apply(model, scheme)
    return model


def decoding(model: Any, context: int, args: argparse.Namespace) -> Callable[[], None]:
    """Some tokens, one after another, behind a context; the cache goes on from round to round."""
    token = torch.ones(1, 1, dtype=torch.long, device=args.device)
    state: dict[str, Any] = {}

    @torch.no_grad()
    def go() -> None:
        if not state:
            state["cache"] = model(token, use_cache=True).past_key_values
            fill(state["cache"], context - 1, model)
        for _ in range(args.tokens):
            at = state["cache"].get_seq_length()
            pos = torch.tensor([[at]], device=args.device)
            model(token, past_key_values=state["cache"], position_ids=pos, use_cache=True)

    return go


def prefill(model: Any, n: int) -> Callable[[], None]:
    """One forward over a whole text."""
    device = next(model.parameters()).device
    tokens = torch.randint(4096, (1, n), generator=torch.Generator().manual_seed(0)).to(device)

    @torch.no_grad()
    def go() -> None:
        model(tokens, use_cache=True, logits_to_keep=1)

    return go


def options() -> argparse.ArgumentParser:
    def sizes(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=sizes, default=[4096, 32768])
    parser.add_argument("--prefill", type=sizes, default=[8192])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-cudnn", action="store_true", help="its attention switched off")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    main()
